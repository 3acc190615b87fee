"""Python imports this at the start of each process of a farm that is followed."""

import os
import sys

if os.environ.get("FARM_WALK"):
    sys.path.insert(0, os.environ["FARM_WALK_HOOK"])
    import recorder

    sys.path.remove(os.environ["FARM_WALK_HOOK"])
    recorder.install()
