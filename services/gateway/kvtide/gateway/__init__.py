"""The public door: OpenAI's API, the life of each request, streams, usage."""
