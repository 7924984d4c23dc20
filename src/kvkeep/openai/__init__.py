"""OpenAI's formats: bodies of requests (`requests`) and of answers (`answers`), for batch files and the server."""
