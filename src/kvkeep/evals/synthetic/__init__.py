"""Texts that are made by rule: needles in haystacks, chains of variables, lists of words, documents."""
