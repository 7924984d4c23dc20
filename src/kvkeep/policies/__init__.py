"""Eviction policies, one file each; the file's name is the policy's name.

A policy is a score: it never touches storage, attention, the model or the server. Dropping a file into this
folder is all it takes to add one; `kvkeep.registry` finds it.
"""
