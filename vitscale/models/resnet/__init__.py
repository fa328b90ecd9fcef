"""The ResNets: module and foreign weights; what is known without torch is in recipe/families/resnet.py."""

from vitscale.models.resnet.model import ResNet
