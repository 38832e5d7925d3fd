"""Image files of clients, which are read in processes of their own: a decoder may hang, or take all memory.

pixels.py    what Pillow is asked for: the check of a file, and its tiles; runs in such a process
process.py   that process
reader.py    who asks it, and ends it when it takes too long
"""
