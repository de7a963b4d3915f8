"""OpenAI's HTTP API over the gateway. Only this package knows of HTTP."""
