"""The interfaces of other libraries, over kvkeep's policies."""
