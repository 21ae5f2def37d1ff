"""A model folder or file: finding it, reading it, refusing it when it is not whole.

Nothing here computes with weights; `weights.py` alone imports torch, and only to hand out
views of a mapped file. Names, aliases and downloads: `hub.py`, `wheels.py`, `download.py`.
"""
