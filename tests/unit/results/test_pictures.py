"""Pictures of measured curves and distributions."""

from datetime import date
from xml.etree import ElementTree

from farm.results.pictures import curves, totals


def texts(picture: bytes) -> set[str]:
    """Return the texts in an SVG, as a reader sees them."""
    return {"".join(element.itertext()).strip() for element in ElementTree.fromstring(picture).iter() if element.text}


def test_a_picture_names_its_axes_and_series() -> None:
    series = {"fp16": [(1, 10), (8, 50)], "int8": [(1, 12)]}
    picture = curves(title="Throughput", x="batch", y="samples / s", series=series)
    assert {"Throughput", "batch", "samples / s", "fp16", "int8"} <= texts(picture)


def test_names_are_drawn_as_they_stand() -> None:
    """Names come from manifests: neither formulas nor markup."""
    picture = curves(title="$x^2$ <script>", x="x", y="y", series={"a": [(0, 1)]})
    assert "$x^2$ <script>" in texts(picture)


def test_one_outlier_does_not_flatten_the_curves() -> None:
    even = curves(title="t", x="x", y="y", series={"a": [(50, 1.0), (99, 1.2)]})
    steep = curves(title="t", x="x", y="y", series={"a": [(50, 1.0), (99, 38.0)]})
    assert "1.2" in texts(even)
    assert "10" in {text[:2] for text in texts(steep)} and "35" not in texts(steep), "powers of ten"


def test_a_long_title_is_on_several_lines() -> None:
    title = " ".join(["tinynet on onnxruntime/cpu fp32: throughput by batch"] * 3)
    assert title not in texts(curves(title=title, x="x", y="y", series={"a": [(0, 1)]}))


def test_the_same_picture_has_the_same_bytes() -> None:
    drawn = {curves(title="t", x="x", y="y", series={"a": [(0, 1), (1, 2)]}) for _ in range(2)}
    assert len(drawn) == 1


def test_totals_are_drawn_over_days_from_nothing_on() -> None:
    """Days without anything are days, too: the amounts stay what they were."""
    picture = totals(title="Tuned", y="operations", series={"tuned": {date(2026, 11, 14): 3, date(2026, 11, 18): 1}})
    assert {"Tuned", "operations", "tuned", "day (UTC)", "13", "14", "16", "18", "2026-Nov", "4.0"} <= texts(picture)
    alone = totals(title="Tuned", y="operations", series={"tuned": {date(2026, 11, 14): 3}})
    assert {"13", "14"} <= texts(alone)
    assert not any(":" in text for text in texts(alone) if len(text) < 6), "no hours between two days"
