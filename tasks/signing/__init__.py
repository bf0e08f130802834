"""Trust in a model's files: keys, an OpenSSF model-signing bundle over every byte, and a statement of what they are.

Pure: bytes and keys in, values out. Whose keys count for what is tasks/security/trust.py; what is signed, where signatures lie
and when they are asked for is tasks/security/signatures.py. A signature proves origin. See docs/trust.md.
"""
