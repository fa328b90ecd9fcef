"""The Vision Transformers: module and foreign weights; what is known without torch is in families/vit.py."""

from vitscale.models.vit.model import ViT
