"""Makes the pipeline of a source, from its entry in the mix file."""

import hashlib
from pathlib import Path

from omniload.base.errors import ConfigError
from omniload.mix.config import SourceConfig
from omniload.mix.schema.messages import (
    ChatTransform,
    CompletionTransform,
    MessageTransform,
    PreferenceTransform,
)
from omniload.mix.schema.transforms import MapTransform, MiddleTransform, encoding_of
from omniload.source.byte_pairs.files import folder_of
from omniload.source.spec import SourceSpec
from omniload.source.tokenize import Tokenizer, open_tokenizer
from omniload.source.transforms.chat_template import ChatTemplate, TemplateFiles, read_template
from omniload.source.transforms.encoders import (
    ChatEncoder,
    CompletionEncoder,
    Encoder,
    PlainEncoder,
    PreferenceEncoder,
)
from omniload.source.transforms.fill_in_middle import MiddleFiller
from omniload.source.transforms.image_places import (
    ChatLayout,
    Layout,
    PairLayout,
    TextPairLayout,
)
from omniload.source.transforms.images import ImageEncoder
from omniload.source.transforms.message_form import MessageForm
from omniload.source.transforms.pipeline import Pipeline
from omniload.source.transforms.user_functions import MapFunction

__all__ = ["open_pipeline"]


def open_pipeline(spec: SourceSpec) -> Pipeline:
    """Open the tokenizer, and the files that transforms read.

    Raises:
        ConfigError: Text has no tokenizer, a file is missing or damaged, or a token or function is unknown.
    """
    config, tokenizer = spec.config, spec.tokenizer
    pipeline = _opened(spec)
    if any(isinstance(each, MapTransform) for each in config.transforms):
        pipeline = pipeline.with_functions(
            [
                MapFunction(spec.name, each) if isinstance(each, MapTransform) else None
                for each in config.transforms
            ]
        )
    filling = [each for each in config.transforms if isinstance(each, MiddleTransform)]
    # This returns the tokenizer that is open already, because tokenizers are cached by their files.
    opened = open_tokenizer(tokenizer, spec.base_dir) if tokenizer is not None and filling else None
    return pipeline.with_fillers({each: _filler(spec, each, opened) for each in filling})


def _opened(spec: SourceSpec) -> Pipeline:
    name, config, tokenizer = spec.name, spec.config, spec.tokenizer
    if not config.holds_text:
        return Pipeline(None, config.transforms)
    if tokenizer is None:
        raise ConfigError(f"sources.{name} holds text and there is no tokenizer; add a tokenizer")
    opened = open_tokenizer(tokenizer, spec.base_dir)
    first, images = encoding_of(config.transforms), config.images_transform
    # A template that the mix file names is relative to the mix file; otherwise the template is in the tokenizer's
    # folder.
    folder = spec.base_dir, folder_of(tokenizer, spec.base_dir)
    if isinstance(first, MessageTransform) and images is None:
        return _of_messages(name, config, first, opened, folder=folder)
    if images is None:
        return Pipeline(PlainEncoder(opened), config.transforms)
    layout: Layout | None = None
    read = ""
    if isinstance(first, PreferenceTransform) and first.form == "text":
        pairs = PreferenceEncoder(first, _text_key(config), None, opened)
        layout = TextPairLayout(pairs, images.marker)
    elif isinstance(first, ChatTransform | PreferenceTransform):
        layout, read = _layout_of(name, config, first, opened, folder=folder)
    encoder = ImageEncoder(images, opened, spec.row_length, layout)
    # Another version may decode to other pixels, so a resume under it is refused.
    digest = hashlib.blake2b(encoder.library.encode(), digest_size=6).hexdigest()
    # A pair is never cut, with or without images.
    cut_at = None if isinstance(first, PreferenceTransform) else spec.row_length
    return Pipeline(encoder, config.transforms, f"{read} {digest}".strip(), cut_at)


def _of_messages(
    name: str,
    config: SourceConfig,
    transform: MessageTransform,
    opened: Tokenizer,
    *,
    folder: tuple[Path, Path],
) -> Pipeline:
    key, template, digest = _text_key(config), None, ""
    if isinstance(transform, ChatTransform) or transform.form == "chat":
        template, digest = _template_of(name, transform, folder)
    encoder: Encoder
    if isinstance(transform, CompletionTransform):
        encoder = CompletionEncoder(transform, key, template, opened)
    elif isinstance(transform, PreferenceTransform):
        encoder = PreferenceEncoder(transform, key, template, opened)
    else:
        assert template is not None, "conversations have one"
        encoder = ChatEncoder(template, opened, transform, key)
    return Pipeline(encoder, config.transforms, digest)


def _layout_of(
    name: str,
    config: SourceConfig,
    transform: ChatTransform | PreferenceTransform,
    opened: Tokenizer,
    *,
    folder: tuple[Path, Path],
) -> tuple[Layout, str]:
    """Return the layout for images in conversations, and the digest of the template."""
    template, digest = _template_of(name, transform, folder)
    words, images = transform.image_words, config.images_transform
    assert words is not None, "the model has seen to it"
    assert images is not None, "there are images"
    try:
        form = MessageForm.of(template, words, images)
    except ConfigError as error:
        error.add_note(f"transforms of sources.{name}")
        raise
    key = _text_key(config)
    if isinstance(transform, ChatTransform):
        return ChatLayout(ChatEncoder(template, opened, transform, key), form), digest
    return PairLayout(PreferenceEncoder(transform, key, template, opened), form), digest


def _text_key(config: SourceConfig) -> str:
    """Return the key or column of the text; empty for a source without one."""
    return str(getattr(config, "column", None) or getattr(config, "text", None) or "")


def _template_of(
    name: str, config: MessageTransform, folder: tuple[Path, Path]
) -> tuple[ChatTemplate, str]:
    """Return the compiled template that a transform names, and its digest."""
    base_dir, beside = folder
    try:
        files = read_template(base_dir / config.template if config.template else None, beside)
        return ChatTemplate(files, date=config.date), _digest_of(files)
    except ConfigError as error:
        # The message names the file of the template, but not the source.
        error.add_note(f"transforms of sources.{name}")
        raise


def _filler(
    spec: SourceSpec, transform: MiddleTransform, tokenizer: Tokenizer | None
) -> MiddleFiller:
    """Find the tokens of a transform in the vocabulary.

    Raises:
        ConfigError: A token is missing.
    """
    marks = []
    size = 0 if tokenizer is None else tokenizer.vocab_size
    for key in ("prefix", "suffix", "middle"):
        mark: str | int = getattr(transform, key)
        found = (
            mark if isinstance(mark, int) else None if tokenizer is None else tokenizer.id_of(mark)
        )
        # A model has no embedding for an id beyond the tokenizer's vocabulary.
        if found is None or (tokenizer is not None and found >= size):
            has = (
                "there is no tokenizer" if tokenizer is None else f"the tokenizer has {size} others"
            )
            raise ConfigError(
                f"sources.{spec.name}.transforms: fim: {key} is {mark!r}, and {has}; name a token of the vocabulary, "
                "or its id"
            )
        marks.append(found)
    # The source may name its own end of document, which need not be the tokenizer's.
    end = getattr(spec.config, "end_of_document", None)
    if end is None and tokenizer is not None:
        end = tokenizer.end_of_document_id
    return MiddleFiller(
        rate=transform.rate,
        spm=transform.spm,
        marks=marks,
        begin=None if tokenizer is None else tokenizer.begin_of_document_id,
        end=end,
        key=MiddleFiller.key_of(spec.seed, spec.name),
    )


def _digest_of(files: TemplateFiles) -> str:
    # The digest covers special tokens, because a template writes them, and others would change the text.
    tokens = "\0".join(f"{key}={value}" for key, value in sorted(files.tokens.items()))
    return hashlib.blake2b(f"{files.source}\0{tokens}".encode(), digest_size=6).hexdigest()
