"""The SSD tier: blocks that left DRAM, in segment files of one directory a node."""
