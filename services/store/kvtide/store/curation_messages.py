"""What people ask of a store's blocks, and what it answers."""

from kvtide.bus.messages import (
    BlockPage,
    BlocksDone,
    Failure,
    ListBlocks,
    PinBlocks,
    RemoveBlocks,
    UnpinBlocks,
)

CurationRequest = ListBlocks | PinBlocks | UnpinBlocks | RemoveBlocks
CurationAnswer = BlockPage | BlocksDone | Failure
