"""Small programs to start from; tests/docs/test_examples.py runs each of them against a real ring."""
