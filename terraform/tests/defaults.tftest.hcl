# Run with `terraform test` in terraform/. The provider is mocked: nothing is created and no account is needed.
mock_provider "google" {}

variables {
  project_id = "attention-class"
}

run "a_cluster_that_is_closed_by_default" {
  assert {
    condition     = google_container_cluster.main.location == "us-central1-a" && google_container_cluster.main.name == "jax-gpu-cluster"
    error_message = "the cluster is zonal and has the codelab's name"
  }
  assert {
    condition     = google_container_cluster.main.private_cluster_config[0].enable_private_nodes
    error_message = "nodes have no public address"
  }
  assert {
    condition = alltrue([
      google_container_cluster.main.control_plane_endpoints_config[0].dns_endpoint_config[0].allow_external_traffic,
      !google_container_cluster.main.control_plane_endpoints_config[0].ip_endpoints_config[0].enabled,
    ])
    error_message = "the control plane is reached by its DNS name only"
  }
  assert {
    condition     = google_container_cluster.main.datapath_provider == "ADVANCED_DATAPATH"
    error_message = "Dataplane V2 enforces NetworkPolicies"
  }
  assert {
    condition     = google_container_cluster.main.workload_identity_config[0].workload_pool == "attention-class.svc.id.goog"
    error_message = "Workload Identity is on"
  }
  assert {
    condition     = google_container_cluster.main.enable_shielded_nodes && google_container_cluster.main.deletion_protection == false
    error_message = "nodes are shielded, and teardown can delete the cluster"
  }
  assert {
    condition     = google_container_cluster.main.remove_default_node_pool && google_container_cluster.main.initial_node_count == 1
    error_message = "GKE's first pool goes"
  }
  assert {
    condition = alltrue([
      google_container_cluster.main.ip_allocation_policy[0].cluster_secondary_range_name == google_compute_subnetwork.nodes.secondary_ip_range[0].range_name,
      google_container_cluster.main.ip_allocation_policy[0].services_secondary_range_name == google_compute_subnetwork.nodes.secondary_ip_range[1].range_name,
    ])
    error_message = "pods and services take the subnet's ranges"
  }
  assert {
    condition = alltrue([
      google_container_cluster.main.release_channel[0].channel == "REGULAR",
      length(google_container_cluster.main.maintenance_policy[0].maintenance_exclusion) == 0,
    ])
    error_message = "channel REGULAR, and no class day yet"
  }
  assert {
    condition = alltrue([
      google_container_cluster.main.resource_labels["course"] == "attention",
      google_container_node_pool.gpu.node_config[0].resource_labels["course"] == "attention",
      google_container_node_pool.system.node_config[0].resource_labels["course"] == "attention",
      google_artifact_registry_repository.images.labels["course"] == "attention",
    ])
    error_message = "what is billed carries the label"
  }
}

run "nodes_have_an_account_of_their_own_that_may_do_little" {
  assert {
    condition = alltrue([
      google_container_node_pool.gpu.node_config[0].service_account == google_service_account.nodes.email,
      google_container_node_pool.system.node_config[0].service_account == google_service_account.nodes.email,
      google_container_cluster.main.node_config[0].service_account == google_service_account.nodes.email,
    ])
    error_message = "no node runs as the project's default account"
  }
  assert {
    condition = alltrue([
      google_project_iam_member.nodes.role == "roles/container.defaultNodeServiceAccount",
      google_project_iam_member.nodes.member == "serviceAccount:${google_service_account.nodes.email}",
    ])
    error_message = "in the project the nodes have the one role that nodes need"
  }
  assert {
    condition = alltrue([
      google_artifact_registry_repository_iam_member.nodes_read.role == "roles/artifactregistry.reader",
      google_artifact_registry_repository_iam_member.nodes_read.repository == google_artifact_registry_repository.images.name,
      google_artifact_registry_repository_iam_member.nodes_read.member == "serviceAccount:${google_service_account.nodes.email}",
    ])
    error_message = "nodes read the one repository, and write none"
  }
  assert {
    condition = alltrue([
      google_project_iam_member.build.role == "roles/cloudbuild.builds.builder",
      google_project_iam_member.build.member == "serviceAccount:${google_service_account.build.email}",
    ])
    error_message = "builds have their account"
  }
  assert {
    condition     = google_service_account.nodes.account_id == "jax-gpu-cluster-nodes" && google_service_account.build.account_id == "jax-gpu-cluster-build"
    error_message = "accounts are named after the cluster"
  }
}

run "gpu_nodes_come_when_asked_for_and_are_guarded" {
  assert {
    condition = alltrue([
      google_container_node_pool.gpu.autoscaling[0].total_min_node_count == 0,
      google_container_node_pool.gpu.autoscaling[0].total_max_node_count == 1,
      google_container_node_pool.gpu.initial_node_count == 0,
    ])
    error_message = "from zero to max_gpu_nodes"
  }
  assert {
    condition = [for taint in google_container_node_pool.gpu.node_config[0].taint : "${taint.key}=${taint.value}:${taint.effect}"
    ] == ["nvidia.com/gpu=present:NO_SCHEDULE"]
    error_message = "the GPU taint is declared"
  }
  assert {
    condition = alltrue([
      google_container_node_pool.gpu.node_config[0].guest_accelerator[0].type == "nvidia-l4",
      google_container_node_pool.gpu.node_config[0].guest_accelerator[0].gpu_driver_installation_config[0].gpu_driver_version == "LATEST",
    ])
    error_message = "GKE installs its latest driver for the L4"
  }
  assert {
    condition = alltrue([for shield in [
      google_container_node_pool.gpu.node_config[0].shielded_instance_config[0],
      google_container_node_pool.system.node_config[0].shielded_instance_config[0],
      google_container_cluster.main.node_config[0].shielded_instance_config[0],
    ] : shield.enable_secure_boot && shield.enable_integrity_monitoring])
    error_message = "secure boot and integrity monitoring on every node"
  }
  assert {
    condition = alltrue([
      google_container_node_pool.gpu.node_config[0].workload_metadata_config[0].mode == "GKE_METADATA",
      google_container_node_pool.system.node_config[0].workload_metadata_config[0].mode == "GKE_METADATA",
    ])
    error_message = "pods do not see the node's identity"
  }
  assert {
    condition     = google_container_node_pool.gpu.node_config[0].gcfs_config[0].enabled && google_container_node_pool.gpu.node_config[0].image_type == "COS_CONTAINERD"
    error_message = "images are streamed"
  }
  assert {
    condition     = google_container_node_pool.gpu.upgrade_settings[0].max_surge == 0 && google_container_node_pool.gpu.upgrade_settings[0].max_unavailable == 1
    error_message = "an upgrade needs no second L4"
  }
  assert {
    condition = alltrue([
      length(google_container_node_pool.system.node_config[0].taint) == 0,
      length(google_container_node_pool.system.node_config[0].guest_accelerator) == 0,
      startswith(google_container_node_pool.system.node_config[0].machine_type, "e2-"),
      google_container_node_pool.system.node_count == 1,
    ])
    error_message = "the system pool is one small node that takes any pod"
  }
}

run "the_network_lets_nodes_out_and_nobody_in" {
  assert {
    condition = alltrue([
      !google_compute_network.vpc.auto_create_subnetworks,
      google_compute_subnetwork.nodes.private_ip_google_access && google_compute_subnetwork.nodes.region == "us-central1",
    ])
    error_message = "a VPC with one private subnet in the zone's region"
  }
  assert {
    condition = alltrue([
      google_compute_router_nat.nat.nat_ip_allocate_option == "AUTO_ONLY",
      google_compute_router_nat.nat.source_subnetwork_ip_ranges_to_nat == "ALL_SUBNETWORKS_ALL_IP_RANGES",
      google_compute_router_nat.nat.region == "us-central1",
    ])
    error_message = "Cloud NAT serves the subnet"
  }
}

run "apis_are_enabled_and_stay" {
  assert {
    condition = toset([for api in google_project_service.api : api.service]) == toset([
      "container.googleapis.com", "compute.googleapis.com", "iam.googleapis.com", "cloudresourcemanager.googleapis.com",
      "logging.googleapis.com", "monitoring.googleapis.com", "artifactregistry.googleapis.com",
      "cloudbuild.googleapis.com", "containerfilesystem.googleapis.com",
    ])
    error_message = "the codelab's six APIs, the repository, its builds and image streaming"
  }
  assert {
    condition     = alltrue([for api in google_project_service.api : api.disable_on_destroy == false])
    error_message = "destroy leaves APIs on, which something else may use"
  }
}

run "outputs" {
  assert {
    condition     = output.get_credentials_command == "gcloud container clusters get-credentials jax-gpu-cluster --location us-central1-a --project attention-class --dns-endpoint"
    error_message = "the command connects by the DNS endpoint: ${output.get_credentials_command}"
  }
  assert {
    condition     = output.image_repository == "us-central1-docker.pkg.dev/attention-class/jax-gpu-cluster" && google_artifact_registry_repository.images.format == "DOCKER"
    error_message = "image_repository is what docker and Cloud Build take: ${output.image_repository}"
  }
  assert {
    condition     = output.build_service_account == google_service_account.build.email
    error_message = "Cloud Build is told its account"
  }
  assert {
    condition     = output.gpu_count == 1 && output.region == "us-central1" && output.zone == "us-central1-a" && output.project_id == "attention-class" && output.cluster_name == "jax-gpu-cluster"
    error_message = "what the commands in deploy/ read"
  }
  assert {
    condition = alltrue([for words in [
      format("about USD %.2f an hour", local.price.l4 + 8 * local.price.g2_vcpu), "At most 1 ", "Always, until teardown", "check https://",
    ] : strcontains(output.cost_note, words)])
    error_message = "the cost note does its sum and says where to check: ${output.cost_note}"
  }
}

run "a_project_whose_id_only_looks_like_a_placeholder" {
  command = plan
  variables {
    project_id = "my-first-project-4711"
  }
  assert {
    condition     = output.project_id == "my-first-project-4711"
    error_message = "Google makes such ids"
  }
}
