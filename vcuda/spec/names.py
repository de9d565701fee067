"""Every resource, annotation and label name of the product; the domain in front of them is one setting.

The names are those of tkestack gpu-manager (so its users' pods run unchanged) plus our own, same domain.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

DEFAULT_DOMAIN = "tencent.com"

# Labels that are not under the domain: the old DaemonSet selects its nodes by the first one.
NODE_SELECTOR_LABEL = "nvidia-device-enable"
NODE_SELECTOR_VALUE = "enable"

# Pod groups as kube-scheduler's coscheduling plugin names them: the label of today, and the two of its first version.
POD_GROUP_LABEL = "scheduling.x-k8s.io/pod-group"
OLD_POD_GROUP_NAME_LABEL = "pod-group.scheduling.sigs.k8s.io/name"
OLD_POD_GROUP_SIZE_LABEL = "pod-group.scheduling.sigs.k8s.io/min-available"


@dataclass(frozen=True)
class Names:
    """The full names under one domain. Values on the wire are always strings."""

    domain: str = DEFAULT_DOMAIN

    @cached_property
    def core(self) -> str:
        """Resource: hundredths of a card."""
        return f"{self.domain}/vcuda-core"

    @cached_property
    def memory(self) -> str:
        """Resource in a pod: 256 MiB blocks. As an annotation on an allocated container: bytes."""
        return f"{self.domain}/vcuda-memory"

    @cached_property
    def device(self) -> str:
        """Annotation in Allocate's response: UUIDs of the container's cards."""
        return f"{self.domain}/vcuda-device"

    # --- Dynamic Resource Allocation ---
    @cached_property
    def driver(self) -> str:
        """Driver: of Dynamic Resource Allocation; a DeviceClass has the same name."""
        return f"vcuda.{self.domain}"

    @cached_property
    def config_version(self) -> str:
        """Version: of a claim's `ShareConfig`."""
        return f"{self.driver}/v1"

    # --- what the extender writes on waiting pods ---
    @cached_property
    def retry(self) -> str:
        """Annotation: when the extender last had kube-scheduler look again at the pod, which it had refused."""
        return f"{self.domain}/vcuda-retry"

    # --- what users write on pods ---
    @cached_property
    def core_limit(self) -> str:
        """Annotation: elastic limit in cores for each share of the pod."""
        return f"{self.domain}/vcuda-core-limit"

    @cached_property
    def priority(self) -> str:
        """Annotation: `low`, `normal` or `high`: who comes first on a contended card, within what each is promised."""
        return f"{self.domain}/vcuda-priority"

    @cached_property
    def policy(self) -> str:
        """Annotation: the extender's placement policy for this pod."""
        return f"{self.domain}/vcuda-policy"

    @cached_property
    def card_model(self) -> str:
        """Annotation: only cards of these models."""
        return f"{self.domain}/vcuda-card-model"

    @cached_property
    def card_uuid(self) -> str:
        """Annotation: only these cards."""
        return f"{self.domain}/vcuda-card-uuid"

    @cached_property
    def oversell(self) -> str:
        """Annotation: how many blocks a share may hold in all, beyond its own as managed memory (see `request`)."""
        return f"{self.domain}/vcuda-oversell"

    @cached_property
    def gang(self) -> str:
        """Annotation: "NAME/SIZE", or "SIZE" beside the label of a pod group (`vcuda.spec.gang`)."""
        return f"{self.domain}/vcuda-gang"

    @cached_property
    def movable(self) -> str:
        """Annotation: "false" keeps a pod out of defragmentation plans."""
        return f"{self.domain}/vcuda-movable"

    @cached_property
    def resize(self) -> str:
        """Annotation on a running pod: the amounts that it is to have from now on.

        Condition of the pod: what the extender answered.
        """
        return f"{self.domain}/vcuda-resize"

    # --- what the extender writes at bind; untrusted and replaced on a new pod ---
    @cached_property
    def placement(self) -> str:
        """Annotation: the authoritative placement, keyed by container name (`vcuda.spec.placement`)."""
        return f"{self.domain}/vcuda-placement"

    def predicate_gpu_index(self, container_index: int) -> str:
        """Annotation: comma list of card minors for `spec.containers[container_index]` (old name)."""
        return f"{self.domain}/predicate-gpu-idx-{container_index}"

    @cached_property
    def predicate_time(self) -> str:
        """Annotation: nanoseconds since the epoch at which the node was chosen."""
        return f"{self.domain}/predicate-time"

    @cached_property
    def predicate_node(self) -> str:
        """Annotation: the node that was chosen (old name)."""
        return f"{self.domain}/predicate-node"

    @cached_property
    def gpu_assigned(self) -> str:
        """Annotation: "false" at bind, "true" once the manager has allocated the devices."""
        return f"{self.domain}/gpu-assigned"

    # --- what the manager writes on its node ---
    @cached_property
    def inventory(self) -> str:
        """Annotation on nodes: the node's cards (`vcuda.spec.inventory`)."""
        return f"{self.domain}/vcuda-inventory"

    @cached_property
    def bookings(self) -> str:
        """Annotation on nodes: what each pod and claim was given there (`vcuda.spec.bookings`)."""
        return f"{self.domain}/vcuda-bookings"

    @cached_property
    def model_label(self) -> str:
        """Label on nodes: the model of their cards (old name, below `gaia.` of the domain)."""
        return f"gaia.{self.domain}/gpu-model"

    @cached_property
    def role_label(self) -> str:
        """Label on the extender's own pods: "leader" or "standby"; the Service selects the leader."""
        return f"{self.domain}/vcuda-extender-role"

    @cached_property
    def admission_label(self) -> str:
        """Label on namespaces: "ignore" exempts their pods from the admission webhook."""
        return f"{self.domain}/vcuda-admission"

    def written_by_us(self, annotation: str) -> bool:
        """Whether a pod annotation is ours to write, hence untrusted on a pod that is not bound yet."""
        fixed = (self.placement, self.predicate_time, self.predicate_node, self.gpu_assigned)
        return annotation in fixed or self.is_predicate_gpu_index(annotation)

    def is_predicate_gpu_index(self, annotation: str) -> bool:
        return annotation.startswith(f"{self.domain}/predicate-gpu-idx-")
