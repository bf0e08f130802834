"""What a corpus of ten terabytes costs on 1, 8 and 64 machines, by a simulation that is compared with a real run."""
