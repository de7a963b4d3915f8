"""Every parser of bytes from outside that is one call, by name."""

from pathlib import Path

from tests.unit.fuzzing import Target
from tests.unit.test_fuzz_bodies import targets as bodies
from tests.unit.test_fuzz_files import Folder, targets as files
from tests.unit.test_fuzz_models import MODEL_FILES, target as model
from tests.unit.test_fuzz_peers import TARGETS as PEERS, files as model_texts
from tests.unit.test_fuzz_wire import TARGETS as WIRE


def all_targets(folder: Path) -> dict[str, Target]:
    """By name; files that are tried lie in ``folder``."""
    found = [
        *WIRE,
        *PEERS,
        *model_texts(folder),
        *files(Folder(folder)).values(),
        *bodies(),
    ]
    found += [model(folder, name) for name in MODEL_FILES]
    return {target.name: target for target in found}
