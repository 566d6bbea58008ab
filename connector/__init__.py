"""What is known about how vLLM and Mooncake speak: tokens, hashes, events, keys, settings."""
