"""vLLM as the engine of a kvtide worker. ``engine`` and ``sampling`` import vLLM."""
