"""The model of an engine behind vLLM's HTTP surface, KV events and metrics, in real time."""
