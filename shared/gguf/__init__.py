"""Models in llama.cpp's GGUF files, made into folders that mlx-lm loads, without MLX.

Read in this order: `file` reads a file's header and refuses what is cut or made up; `families` knows what llama.cpp
calls the parts of each family of models; `blocks` makes arrays of a tensor's blocks; `tokenizer` builds tokenizer.json
and chat template from the metadata; `conversion` writes the folder; `cached` keeps folders of files that are served.
"""
