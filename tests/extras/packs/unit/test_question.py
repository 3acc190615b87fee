from typing import Any

import pytest

from farm.compiling.asking import WrongAnswer, read_answer
from farm.extras.packs.fetch import CacheNamesAnswer

ASKED: Any = {"action": "cache_names", "extension": "onnxruntime-cache"}
ANSWER = {"version": "1.23", "names": ["a.mxr"], "found": False}


def test_what_the_provider_answers_is_taken_without_what_nobody_asked() -> None:
    assert read_answer(ASKED, {**ANSWER, "more": 1}, CacheNamesAnswer) == ANSWER


@pytest.mark.parametrize("name", ["../a.mxr", "a/b.mxr", ".mxr", "a.mxr\n", "x" * 260 + ".mxr"])
def test_a_name_that_leaves_the_cache_is_refused(name: str) -> None:
    with pytest.raises(WrongAnswer, match=r"another form|more than 256"):
        read_answer(ASKED, {**ANSWER, "names": [name]}, CacheNamesAnswer)
