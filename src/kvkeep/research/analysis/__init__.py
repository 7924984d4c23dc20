"""What the papers saw, on any model and text: measurements over one streamed pass, and a page of what they show."""
