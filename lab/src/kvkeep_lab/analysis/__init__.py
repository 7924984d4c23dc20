"""The papers' observations, measured on any model and text in one streamed pass, and a page that shows them."""
