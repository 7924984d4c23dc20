"""OpenAI's formats: bodies of requests (`requests`), of answers (`answers`), and lines of its batch files (`batch`)."""
