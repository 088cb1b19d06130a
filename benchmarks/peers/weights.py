"""The demo model in the formats the engines read, made from its one GGUF file: every engine computes with the same numbers.

The file holds blocks of four bits (Q4_1) with a head of eight (Q8_0). From it come, once, into ``DIRECTORY/weights``:

``source``       the file itself, where pip put it
``f32.gguf``     every tensor dequantized
``f16.gguf``     the same, matrices rounded to 16 bits
``q8_0.gguf``    the same, matrices rounded to blocks of eight bits (which the head already is)
``huggingface``  the float32 values and the tokenizer as transformers saves them
"""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np

from ..server import demo_model

_FILES = {
    "f32.gguf": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16.gguf": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0.gguf": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}


def weights(kind: str, directory: Path) -> Path:
    """Path of the model in the format ``kind``, made if it is not there yet (seconds). Raises FileNotFoundError without the demo model."""
    source = demo_model()
    if kind == "source":
        return source
    path = directory / "weights" / (f"{source.stem}-{kind}")
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")  # an interrupted conversion must not be taken for a model
    if kind == "huggingface":
        shutil.rmtree(unfinished, ignore_errors=True)
        _write_huggingface(source, unfinished)
    else:
        _write_gguf(source, unfinished, *_FILES[kind])
    return unfinished.rename(path)


def _write_gguf(source: Path, target: Path, number: gguf.GGMLQuantizationType, file_type: gguf.LlamaFileType) -> None:
    """``source`` with its matrices as ``number`` and its vectors as float32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, arch=reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue  # the writer brings its own
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], element)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = number if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_huggingface(source: Path, target: Path) -> None:
    from transformers import AutoTokenizer
    from twinplane.benchmarks import reference_model

    reference_model.load(source).save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
