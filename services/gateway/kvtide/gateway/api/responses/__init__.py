"""OpenAI's Responses API, stateless, in front of the same answers."""
