"""Images in prompts, as plain data: what a model makes of them, and how a sequence names them.

    refs.py     the names of images in a sequence, and the ids that stand for them in keys of KV
    layout.py   how many tokens an image of some size comes to, and which pixels each of them sees
    chat.py     both of all images of a chat, and the text that stands for them

Whoever reads the files themselves: `shared/image_files/`.
"""
