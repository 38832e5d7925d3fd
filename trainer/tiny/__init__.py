"""The tiny model that demo and tests run on: its data, its shape and the script that trains it."""
