"""A page of ours as the tests read it: its elements with their attributes, its text, and whether every tag is closed in order."""

from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br"}


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self.raw = [], "", text
        self._open = []
        self.feed(text)
        self.close()
        assert not self._open
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] not in ("style", "title"):
            self.text += f"{data} "

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]
