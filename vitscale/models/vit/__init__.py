"""The Vision Transformers: module and foreign weights; what is known without torch is in recipe/families/vit.py."""

from vitscale.models.vit.model import ViT
