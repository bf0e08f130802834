"""The templates of pages, and their style; pages.py fills them in."""
