"""Convert a saved Hugging Face model for OpenVINO: ``openvino_convert.py SOURCE TARGET fp32|int8|int4``.

Runs with the Python of the environment that OpenVINO is installed in, and so imports nothing of Twinplane.
"""

from __future__ import annotations

import sys

from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

# Four bits as a user would get them who wants speed: every matrix in groups of 64, those of the embedding and the head in eight bits.
_COMPRESSION = {
    "fp32": None,
    "int8": OVWeightQuantizationConfig(bits=8),
    "int4": OVWeightQuantizationConfig(bits=4, sym=False, group_size=64, ratio=1.0),
}


def main() -> None:
    source, target, precision = sys.argv[1:]
    compression = _COMPRESSION[precision]
    # load_in_8bit unset would compress to eight bits only models above a billion parameters; False says never.
    options = {"load_in_8bit": False} if compression is None else {"quantization_config": compression}
    OVModelForCausalLM.from_pretrained(source, export=True, compile=False, **options).save_pretrained(target)


if __name__ == "__main__":
    main()
