"""The inference runtime: engine, OpenAI API and model loader."""
