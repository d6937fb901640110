# Every refusal: what a person can get wrong is refused before anything is created.
mock_provider "google" {}

variables {
  project_id = "attention-class"
}

run "the_placeholder_project" {
  command = plan
  variables {
    project_id = "your-gcp-project-id"
  }
  expect_failures = [var.project_id]
}

run "a_project_in_angle_brackets" {
  command = plan
  variables {
    project_id = "<YOUR_PROJECT_ID>"
  }
  expect_failures = [var.project_id]
}

run "an_empty_project" {
  command = plan
  variables {
    project_id = ""
  }
  expect_failures = [var.project_id]
}

run "a_project_number" {
  command = plan
  variables {
    project_id = "123456789012"
  }
  expect_failures = [var.project_id]
}

run "a_project_name" {
  command = plan
  variables {
    project_id = "My Project"
  }
  expect_failures = [var.project_id]
}

run "a_name_too_long_for_a_service_account" {
  command = plan
  variables {
    cluster_name = "attention-on-gpus-spring-1"
  }
  expect_failures = [var.cluster_name]
}

run "a_name_with_capitals" {
  command = plan
  variables {
    cluster_name = "JAX-cluster"
  }
  expect_failures = [var.cluster_name]
}

run "a_zone_without_l4" {
  command = plan
  variables {
    zone = "us-central1-f"
  }
  expect_failures = [google_container_node_pool.gpu]
}

run "a_region_for_a_zone" {
  command = plan
  variables {
    zone = "us-central1"
  }
  expect_failures = [google_container_node_pool.gpu]
}

run "a_machine_without_l4" {
  command = plan
  variables {
    machine_type = "n1-standard-8"
  }
  expect_failures = [google_container_node_pool.gpu]
}

run "a_machine_with_another_gpu" {
  command = plan
  variables {
    machine_type = "a2-highgpu-1g"
  }
  expect_failures = [google_container_node_pool.gpu]
}

run "a_g2_machine_that_does_not_exist" {
  command = plan
  variables {
    machine_type = "g2-standard-64"
  }
  expect_failures = [google_container_node_pool.gpu]
}

run "max_below_min" {
  command = plan
  variables {
    min_gpu_nodes = 3
    max_gpu_nodes = 2
  }
  expect_failures = [google_container_node_pool.gpu]
}

run "a_pool_of_none" {
  command = plan
  variables {
    max_gpu_nodes = 0
  }
  expect_failures = [google_container_node_pool.gpu]
}

run "fewer_nodes_than_none" {
  command = plan
  variables {
    min_gpu_nodes = -1
  }
  expect_failures = [google_container_node_pool.gpu]
}

run "an_unknown_provisioning" {
  command = plan
  variables {
    provisioning = "preemptible"
  }
  expect_failures = [var.provisioning]
}

run "a_reservation_without_a_name" {
  command = plan
  variables {
    provisioning = "reservation"
  }
  expect_failures = [google_container_node_pool.gpu]
}

run "a_reservation_name_with_spot" {
  command = plan
  variables {
    provisioning = "spot"
    reservation  = "class-of-spring"
  }
  expect_failures = [google_container_node_pool.gpu]
}

run "flex_start_with_nodes_kept" {
  command = plan
  variables {
    provisioning  = "flex_start"
    min_gpu_nodes = 1
  }
  expect_failures = [google_container_node_pool.gpu]
}

run "the_whole_internet_as_admin" {
  command = plan
  variables {
    admin_cidrs = ["0.0.0.0/0"]
  }
  expect_failures = [var.admin_cidrs]
}

run "half_the_internet_as_admin" {
  command = plan
  variables {
    admin_cidrs = ["203.0.113.7/32", "128.0.0.0/1"]
  }
  expect_failures = [var.admin_cidrs]
}

run "an_address_without_a_length" {
  command = plan
  variables {
    admin_cidrs = ["203.0.113.7"]
  }
  expect_failures = [var.admin_cidrs]
}

run "an_ipv6_range" {
  command = plan
  variables {
    admin_cidrs = ["::/0"]
  }
  expect_failures = [var.admin_cidrs]
}

run "a_class_day_that_is_no_date" {
  command = plan
  variables {
    class_day = "15 March"
  }
  expect_failures = [var.class_day]
}

