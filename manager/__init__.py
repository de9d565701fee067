"""The node daemon gpu-manager.

May import vcuda.spec, vcuda.region and vcuda.arbiter; never scheduler_ext, deploy or vcuda.sim.
"""
