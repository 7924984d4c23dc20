"""Eviction policies, one file each; the file's name is the policy's name.

A policy is a score: it never touches storage, attention, the model or the server. To add one, put a file into this
folder; `kvkeep.registry` finds it.
"""
