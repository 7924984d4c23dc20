"""The page at ``/``: a chat in the browser that shows what a conversation's memory holds. Its files need no key."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI, Request, Response

FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
"""Path → file and media type."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Add the routes of the page."""
    for path in FILES:
        app.add_api_route(path, _show, methods=["GET"], include_in_schema=False, response_model=None)


async def _show(request: Request) -> Response:
    """Answer with a file of the page."""
    name, kind = FILES[request.url.path]
    return Response(files("kvkeep.server").joinpath("assets", name).read_bytes(), headers=_HEADERS, media_type=kind)
