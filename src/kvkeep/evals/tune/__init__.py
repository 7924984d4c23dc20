"""The search for the smallest memory that keeps a share of the full cache's quality.

`plan` checks what the user asks for and lists the candidates, `search` decides what is measured next and stores the
measurements, `documents` holds the questions, `measure` runs candidates and says what that shows, and `report` has the
answer.
"""
