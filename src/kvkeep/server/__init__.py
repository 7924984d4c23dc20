"""The server: OpenAI's API in front of one engine.

The web side is asynchronous and never waits for a step: `app` has the routes, `request_queue` hands requests
to the engine.
"""
