"""How texts are split before pieces are joined, by the name that a GGUF file has for it (`tokenizer.ggml.pre`).

The file has the name only; what it stands for is that of the models' own tokenizers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{ENDS}"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{ENDS}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE = r"[^\r\n\p{L}\p{N}]?"
OTHERS = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{ENDS}"
GPT4O = rf"{BEFORE}{UPPER}*{LOWER}+{CONTRACTIONS}?|{BEFORE}{UPPER}+{LOWER}*{CONTRACTIONS}?|\p{{N}}{{1,3}}{OTHERS}"
NO_HAN = r"&&[^\p{Han}]]"
KIMI = (
    rf"\p{{Han}}+|{BEFORE}{UPPER[:-1]}{NO_HAN}*{LOWER[:-1]}{NO_HAN}+{CONTRACTIONS}?"
    rf"|{BEFORE}{UPPER[:-1]}{NO_HAN}+{LOWER[:-1]}{NO_HAN}*{CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{ENDS}"
)
SEED = rf"{CONTRACTIONS}|{BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{ENDS}"
TEKKEN = rf"{BEFORE}{UPPER}*{LOWER}+|{BEFORE}{UPPER}+{LOWER}*|\p{{N}}{OTHERS}"
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{ENDS}",
)
DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-\ud7ff]+",
    r"\p{N}+",
)


@dataclass(frozen=True)
class PreTokenizer:
    """`patterns` split one after the other. `takes_whole`: a piece that is a token is one, whatever joins would make of
    it. `composes`: letters and accents become one character first. `begins`: a text begins with a token unless the file
    says otherwise."""

    patterns: Sequence[str]
    takes_whole: bool = False
    composes: bool = False
    begins: bool = False


OF_GPT2, OF_DIGITS = PreTokenizer((GPT2,)), PreTokenizer((r"\p{N}", GPT2))
OF_LLAMA3, OF_QWEN2 = PreTokenizer((LLAMA3,), takes_whole=True, begins=True), PreTokenizer((QWEN2,), composes=True)
PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jina-v2-code", "exaone4"), OF_GPT2),
    "roberta-bpe": PreTokenizer((GPT2,), begins=True),
    "modern-bert": PreTokenizer((GPT2,), composes=True, begins=True),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), OF_DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), OF_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), PreTokenizer((LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), OF_QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), PreTokenizer((GPT4O,))),
    "kimi-k2": PreTokenizer((KIMI,)),
    "seed-coder": PreTokenizer((SEED,)),
    "deepseek-llm": PreTokenizer(DEEPSEEK_LLM),
    "tekken": PreTokenizer((TEKKEN,), takes_whole=True, begins=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenizer(DEEPSEEK_V3)),
}
