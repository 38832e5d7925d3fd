"""Models in llama.cpp's GGUF files, made into folders that mlx-lm loads, without MLX.

Read in this order: `file.py` reads a file's header and refuses what is cut or made up; `families.py` knows what
llama.cpp calls the parts of each family of models; `blocks.py` makes arrays of a tensor's blocks; `tokenizer.py` builds
tokenizer.json and chat template from the metadata; `conversion.py` writes the folder; `cached.py` keeps folders of
files that are served.
"""
