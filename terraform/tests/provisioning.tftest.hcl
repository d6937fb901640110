# The four ways to obtain GPU nodes, each with what it needs and without what it refuses; then the other choices.
mock_provider "google" {}

variables {
  project_id = "attention-class"
}

run "on_demand" {
  command = plan
  variables {
    min_gpu_nodes = 1
    max_gpu_nodes = 3
  }
  assert {
    condition = alltrue([
      !google_container_node_pool.gpu.node_config[0].spot && !google_container_node_pool.gpu.node_config[0].flex_start,
      length(google_container_node_pool.gpu.node_config[0].reservation_affinity) == 0,
    ])
    error_message = "neither spot nor flex-start, and whatever reservation matches"
  }
  assert {
    condition = alltrue([
      google_container_node_pool.gpu.initial_node_count == 1 && google_container_node_pool.gpu.autoscaling[0].total_min_node_count == 1,
      google_container_node_pool.gpu.autoscaling[0].total_max_node_count == 3 && google_container_node_pool.gpu.management[0].auto_repair,
    ])
    error_message = "nodes between min and max, repaired"
  }
}

run "spot" {
  command = plan
  variables {
    provisioning = "spot"
  }
  assert {
    condition     = google_container_node_pool.gpu.node_config[0].spot && !google_container_node_pool.gpu.node_config[0].flex_start
    error_message = "spot"
  }
  assert {
    condition     = google_container_node_pool.gpu.autoscaling[0].location_policy == "ANY" && google_container_node_pool.gpu.management[0].auto_repair
    error_message = "spot nodes come from where there are any, and are repaired"
  }
  assert {
    condition     = strcontains(output.cost_note, "With spot") && !strcontains(output.cost_note, "reservation")
    error_message = "the note says that spot prices change"
  }
}

run "reservation" {
  command = plan
  variables {
    provisioning = "reservation"
    reservation  = "class-of-spring"
  }
  assert {
    condition = alltrue([
      google_container_node_pool.gpu.node_config[0].reservation_affinity[0].consume_reservation_type == "SPECIFIC_RESERVATION",
      google_container_node_pool.gpu.node_config[0].reservation_affinity[0].key == "compute.googleapis.com/reservation-name",
      tolist(google_container_node_pool.gpu.node_config[0].reservation_affinity[0].values) == tolist(["class-of-spring"]),
    ])
    error_message = "the reservation is named"
  }
  assert {
    condition     = !google_container_node_pool.gpu.node_config[0].spot && !google_container_node_pool.gpu.node_config[0].flex_start
    error_message = "a reservation is neither spot nor flex-start"
  }
  assert {
    condition     = strcontains(output.cost_note, "billed whether or not")
    error_message = "the note says how reservations are billed"
  }
}

run "flex_start" {
  command = plan
  variables {
    provisioning = "flex_start"
  }
  assert {
    condition     = google_container_node_pool.gpu.node_config[0].flex_start && !google_container_node_pool.gpu.node_config[0].spot
    error_message = "flex-start"
  }
  assert {
    condition     = local.initial_gpu_nodes == null && google_container_node_pool.gpu.autoscaling[0].total_min_node_count == 0
    error_message = "no static size"
  }
  assert {
    condition     = !google_container_node_pool.gpu.management[0].auto_repair && length(google_container_node_pool.gpu.upgrade_settings) == 0
    error_message = "no auto-repair, and upgrades left to GKE"
  }
  assert {
    condition     = google_container_node_pool.gpu.node_config[0].reservation_affinity[0].consume_reservation_type == "NO_RESERVATION"
    error_message = "flex-start takes no reservation"
  }
  assert {
    condition     = google_container_node_pool.gpu.autoscaling[0].location_policy == "ANY"
    error_message = "flex-start wants location policy ANY"
  }
}

run "another_zone_has_its_own_region" {
  command = plan
  variables {
    zone = "northamerica-northeast2-b"
  }
  assert {
    condition = alltrue([
      output.region == "northamerica-northeast2" && google_compute_subnetwork.nodes.region == "northamerica-northeast2",
      google_artifact_registry_repository.images.location == "northamerica-northeast2" && google_container_cluster.main.location == "northamerica-northeast2-b",
    ])
    error_message = "the region follows the zone"
  }
}

run "admin_cidrs_open_the_ip_endpoint_to_them_alone" {
  command = plan
  variables {
    admin_cidrs = ["203.0.113.7/32", "198.51.100.0/24"]
  }
  assert {
    condition     = google_container_cluster.main.control_plane_endpoints_config[0].ip_endpoints_config[0].enabled
    error_message = "the IP endpoint is on"
  }
  assert {
    condition     = toset([for block in google_container_cluster.main.master_authorized_networks_config[0].cidr_blocks : block.cidr_block]) == toset(var.admin_cidrs)
    error_message = "for these ranges"
  }
  assert {
    condition     = google_container_cluster.main.master_authorized_networks_config[0].gcp_public_cidrs_access_enabled == false
    error_message = "and not for every VM of Google Cloud"
  }
}

run "class_day_is_spared_from_upgrades" {
  command = plan
  variables {
    class_day = "2099-03-01"
  }
  assert {
    condition = alltrue([
      one(google_container_cluster.main.maintenance_policy[0].maintenance_exclusion).start_time == "2099-02-28T00:00:00Z",
      one(google_container_cluster.main.maintenance_policy[0].maintenance_exclusion).end_time == "2099-03-03T00:00:00Z",
      one(google_container_cluster.main.maintenance_policy[0].maintenance_exclusion).exclusion_options[0].scope == "NO_MINOR_OR_NODE_UPGRADES",
    ])
    error_message = "from the day before to the day after"
  }
}

run "a_class_day_that_has_passed_is_left_out" {
  command = plan
  variables {
    class_day = "2020-03-01"
  }
  assert {
    condition     = length(google_container_cluster.main.maintenance_policy[0].maintenance_exclusion) == 0
    error_message = "GKE is asked for no exclusion in the past"
  }
}
