"""The Swin Transformers: module and foreign weights; what is known without torch is in recipe/families/swin.py."""

from vitscale.models.swin.model import Swin
