"""Run a decoder: model files, KV memory, mixed steps, sampling.

Only `loading`, `memory`, `runner`, `sampler` and what lies below them import torch;
`facts`, `sampling`, `demo`, `errors`, `progress` and `settings` do not.
"""
