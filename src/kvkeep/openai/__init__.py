"""OpenAI's formats, for batch files and the server.

Bodies of requests (`requests`, `messages`), tools (`tools`), and bodies of answers (`responses`, `logprobs`).
"""
