locals {
  # L4 GPUs by machine: https://cloud.google.com/compute/docs/accelerator-optimized-machines#g2-vms
  l4_count = {
    g2-standard-4  = 1, g2-standard-8 = 1, g2-standard-12 = 1, g2-standard-16 = 1, g2-standard-32 = 1,
    g2-standard-24 = 2, g2-standard-48 = 4, g2-standard-96 = 8
  }
  gpu_count = lookup(local.l4_count, var.machine_type, 0)

  # Zones that sell g2 machines, as of 2026: https://cloud.google.com/compute/docs/regions-zones/gpu-regions-zones
  l4_zones = [
    "asia-east1-[abc]", "asia-northeast1-[abc]", "asia-northeast3-[ab]", "asia-south1-[abc]", "asia-southeast1-[abc]",
    "europe-west1-[bc]", "europe-west2-[ab]", "europe-west3-[ab]", "europe-west4-[abc]", "europe-west6-[bc]",
    "me-central2-[ac]", "northamerica-northeast1-[bc]", "northamerica-northeast2-[ab]", "us-central1-[abc]",
    "us-east1-[bcd]", "us-east4-[ac]", "us-west1-[abc]", "us-west4-[ac]",
  ]

  flex_start = var.provisioning == "flex_start"
  # Flex-start grows from nothing when a pod asks: GKE refuses any static size.
  initial_gpu_nodes = local.flex_start ? null : var.min_gpu_nodes
  reservation_type  = { reservation = "SPECIFIC_RESERVATION", flex_start = "NO_RESERVATION" }

  # A day that has passed protects nothing: the next apply takes it away.
  class_days = [for day in [var.class_day] : day if try(timecmp(timeadd("${day}T00:00:00Z", "48h"), plantimestamp()) > 0, false)]
}

resource "google_container_cluster" "main" {
  name                = var.cluster_name
  location            = var.zone # zonal: one control plane is enough, and the free tier covers one such cluster
  network             = google_compute_network.vpc.id
  subnetwork          = google_compute_subnetwork.nodes.id
  deletion_protection = false # true would have `terraform destroy` refuse: teardown must leave nothing that costs
  resource_labels     = local.labels
  datapath_provider   = "ADVANCED_DATAPATH" # Dataplane V2: without it NetworkPolicies are accepted and not enforced

  # The pool that GKE insists on goes at once, but its one node lives for minutes and needs the same care.
  remove_default_node_pool = true
  initial_node_count       = 1
  node_config {
    service_account = google_service_account.nodes.email
    shielded_instance_config {
      enable_secure_boot          = true
      enable_integrity_monitoring = true
    }
    workload_metadata_config { mode = "GKE_METADATA" }
  }

  ip_allocation_policy {
    cluster_secondary_range_name  = "pods"
    services_secondary_range_name = "services"
  }
  private_cluster_config { enable_private_nodes = true }

  # kubectl comes in by the DNS name, where Google checks the caller's IAM before a byte reaches the cluster. The
  # public IP address, which anybody can knock at, exists only for admin_cidrs.
  control_plane_endpoints_config {
    dns_endpoint_config { allow_external_traffic = true }
    ip_endpoints_config { enabled = length(var.admin_cidrs) > 0 }
  }
  dynamic "master_authorized_networks_config" {
    for_each = length(var.admin_cidrs) > 0 ? [1] : []
    content {
      gcp_public_cidrs_access_enabled = false # else every VM of Google Cloud, anyone's, may try
      dynamic "cidr_blocks" {
        for_each = toset(var.admin_cidrs)
        content {
          cidr_block = cidr_blocks.value
        }
      }
    }
  }

  workload_identity_config {
    workload_pool = "${var.project_id}.svc.id.goog"
  }
  enable_shielded_nodes = true

  addons_config {
    gce_persistent_disk_csi_driver_config {
      enabled = true # the students' volume
    }
    # Said, because GKE's default depends on the version: a class needs no DNS cache, and it is one more address
    # for the NetworkPolicy to let through (it does, should somebody turn this on).
    dns_cache_config { enabled = false }
  }

  release_channel { channel = "REGULAR" } # GKE's own default: some months of others' experience, and patches
  maintenance_policy {
    # Weekends, 06:00 to 16:00 UTC. GKE wants 48 hours in any 32 days: these are 80 at least, 60 around a class then.
    recurring_window {
      start_time = "2026-01-03T06:00:00Z"
      end_time   = "2026-01-03T16:00:00Z"
      recurrence = "FREQ=WEEKLY;BYDAY=SA,SU"
    }
    dynamic "maintenance_exclusion" {
      for_each = local.class_days
      content {
        exclusion_name = "class-${maintenance_exclusion.value}"
        start_time     = timeadd("${maintenance_exclusion.value}T00:00:00Z", "-24h")
        end_time       = timeadd("${maintenance_exclusion.value}T00:00:00Z", "48h")
        exclusion_options {
          scope = "NO_MINOR_OR_NODE_UPGRADES" # security patches of the control plane still come; no pod notices
        }
      }
    }
  }

  # What notebooks print stays in the pods: it would cost, and is nobody's business.
  logging_config { enable_components = ["SYSTEM_COMPONENTS"] }
  monitoring_config {
    enable_components = ["SYSTEM_COMPONENTS"]
    managed_prometheus {
      enabled = false # its collectors would take a good part of the small system node
    }
  }

  depends_on = [google_project_iam_member.nodes]
  lifecycle {
    # Once the first pool is gone the API reports another pool's here, and Terraform would replace the cluster.
    ignore_changes = [node_config]
  }
}

# Runs what GKE itself needs, so that the GPU nodes can all go away.
resource "google_container_node_pool" "system" {
  name       = "system"
  cluster    = google_container_cluster.main.id
  node_count = 1

  management {
    auto_repair  = true
    auto_upgrade = true
  }
  node_config {
    machine_type    = "e2-standard-2"
    disk_size_gb    = 50
    disk_type       = "pd-balanced"
    service_account = google_service_account.nodes.email
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"] # IAM decides, not scopes
    resource_labels = local.labels

    shielded_instance_config {
      enable_secure_boot          = true
      enable_integrity_monitoring = true
    }
    workload_metadata_config { mode = "GKE_METADATA" }
  }

  depends_on = [google_compute_router_nat.nat]
}

resource "google_container_node_pool" "gpu" {
  name               = "gpu"
  cluster            = google_container_cluster.main.id
  initial_node_count = local.initial_gpu_nodes

  autoscaling {
    total_min_node_count = var.min_gpu_nodes
    total_max_node_count = var.max_gpu_nodes
    location_policy      = "ANY" # what spot, reservations and flex-start want; one zone leaves no other choice
  }
  management {
    auto_repair  = !local.flex_start # flex-start refuses repair: its nodes are gone after seven days anyway
    auto_upgrade = true
  }
  # An upgrade drains a node and makes it anew: a surge node would need an L4 beyond the quota. Flex-start has an
  # upgrade strategy of its own, which GKE sets.
  dynamic "upgrade_settings" {
    for_each = local.flex_start ? [] : [1]
    content {
      max_surge       = 0
      max_unavailable = 1
    }
  }
  node_config {
    machine_type    = var.machine_type
    disk_size_gb    = 100 # the image is many gigabytes, unpacked twice that
    disk_type       = "pd-balanced"
    image_type      = "COS_CONTAINERD" # image streaming and the managed driver want it
    service_account = google_service_account.nodes.email
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    resource_labels = local.labels
    spot            = var.provisioning == "spot"
    flex_start      = local.flex_start

    guest_accelerator {
      type  = "nvidia-l4"
      count = local.gpu_count
      # NVIDIA's JAX image 26.06 brings CUDA 13, whose drivers begin at branch 580. GKE offers no number to pin, only
      # DEFAULT, which may be older, and LATEST. `attnlab doctor` in the pod says which one came.
      gpu_driver_installation_config { gpu_driver_version = "LATEST" }
    }
    # Only pods that ask for a GPU come here; the autoscaler must know it while no node exists to show it.
    taint {
      key    = "nvidia.com/gpu"
      value  = "present"
      effect = "NO_SCHEDULE"
    }
    dynamic "reservation_affinity" {
      for_each = contains(keys(local.reservation_type), var.provisioning) ? [local.reservation_type[var.provisioning]] : []
      content {
        consume_reservation_type = reservation_affinity.value
        key                      = var.reservation == "" ? null : "compute.googleapis.com/reservation-name"
        values                   = var.reservation == "" ? null : [var.reservation]
      }
    }
    gcfs_config {
      enabled = true # image streaming: a pod starts before all of its image has come (Artifact Registry only)
    }
    # With secure boot only drivers that Google signed load: the managed one, and none that a pod brings.
    shielded_instance_config {
      enable_secure_boot          = true
      enable_integrity_monitoring = true
    }
    workload_metadata_config {
      mode = "GKE_METADATA" # pods see their own identity, not the node's
    }
  }

  # On destroy the nodes go before their way out does.
  depends_on = [google_compute_router_nat.nat, google_artifact_registry_repository_iam_member.nodes_read]

  lifecycle {
    ignore_changes = [initial_node_count] # another minimum is for the autoscaler, no reason to make the pool anew

    precondition {
      condition     = local.gpu_count > 0
      error_message = "machine_type is \"${var.machine_type}\", which has no L4 GPU: give one of ${join(", ", keys(local.l4_count))}."
    }
    precondition {
      condition     = anytrue([for zones in local.l4_zones : can(regex("^${zones}$", var.zone))])
      error_message = "zone is \"${var.zone}\", where no L4 GPU is: give one of ${join(", ", local.l4_zones)}."
    }
    precondition {
      condition     = var.min_gpu_nodes >= 0 && var.max_gpu_nodes >= max(1, var.min_gpu_nodes)
      error_message = "max_gpu_nodes is ${var.max_gpu_nodes} and min_gpu_nodes ${var.min_gpu_nodes}: the first must be 1 or more and no less than the second, the second 0 or more."
    }
    precondition {
      condition     = (var.provisioning == "reservation") == (var.reservation != "")
      error_message = "provisioning is \"${var.provisioning}\" and reservation \"${var.reservation}\": give provisioning = \"reservation\" and a name (gcloud compute reservations list), or neither."
    }
    precondition {
      condition     = !local.flex_start || var.min_gpu_nodes == 0
      error_message = "provisioning is \"flex_start\", which keeps no nodes, and min_gpu_nodes is ${var.min_gpu_nodes}: set it to 0."
    }
  }
}
