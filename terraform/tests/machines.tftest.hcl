# Every g2-standard machine has the number of L4 GPUs that Google gives it, and its sum in the cost note.
mock_provider "google" {}

variables {
  project_id = "attention-class"
}

run "g2_standard_4_has_1" {
  command = plan
  variables {
    machine_type = "g2-standard-4"
  }
  assert {
    condition     = google_container_node_pool.gpu.node_config[0].guest_accelerator[0].count == 1 && output.gpu_count == 1
    error_message = "g2-standard-4 has 1"
  }
  assert {
    condition     = strcontains(output.cost_note, format("%.2f an hour", 1 * local.price.l4 + 4 * local.price.g2_vcpu))
    error_message = "1 L4 and 4 vCPUs in the sum"
  }
}

run "g2_standard_8_has_1" {
  command = plan
  variables {
    machine_type = "g2-standard-8"
  }
  assert {
    condition     = google_container_node_pool.gpu.node_config[0].guest_accelerator[0].count == 1 && output.gpu_count == 1
    error_message = "g2-standard-8 has 1"
  }
  assert {
    condition     = strcontains(output.cost_note, format("%.2f an hour", 1 * local.price.l4 + 8 * local.price.g2_vcpu))
    error_message = "1 L4 and 8 vCPUs in the sum"
  }
}

run "g2_standard_12_has_1" {
  command = plan
  variables {
    machine_type = "g2-standard-12"
  }
  assert {
    condition     = google_container_node_pool.gpu.node_config[0].guest_accelerator[0].count == 1 && output.gpu_count == 1
    error_message = "g2-standard-12 has 1"
  }
  assert {
    condition     = strcontains(output.cost_note, format("%.2f an hour", 1 * local.price.l4 + 12 * local.price.g2_vcpu))
    error_message = "1 L4 and 12 vCPUs in the sum"
  }
}

run "g2_standard_16_has_1" {
  command = plan
  variables {
    machine_type = "g2-standard-16"
  }
  assert {
    condition     = google_container_node_pool.gpu.node_config[0].guest_accelerator[0].count == 1 && output.gpu_count == 1
    error_message = "g2-standard-16 has 1"
  }
  assert {
    condition     = strcontains(output.cost_note, format("%.2f an hour", 1 * local.price.l4 + 16 * local.price.g2_vcpu))
    error_message = "1 L4 and 16 vCPUs in the sum"
  }
}

run "g2_standard_24_has_2" {
  command = plan
  variables {
    machine_type = "g2-standard-24"
  }
  assert {
    condition     = google_container_node_pool.gpu.node_config[0].guest_accelerator[0].count == 2 && output.gpu_count == 2
    error_message = "g2-standard-24 has 2"
  }
  assert {
    condition     = strcontains(output.cost_note, format("%.2f an hour", 2 * local.price.l4 + 24 * local.price.g2_vcpu))
    error_message = "2 L4 and 24 vCPUs in the sum"
  }
}

run "g2_standard_32_has_1" {
  command = plan
  variables {
    machine_type = "g2-standard-32"
  }
  assert {
    condition     = google_container_node_pool.gpu.node_config[0].guest_accelerator[0].count == 1 && output.gpu_count == 1
    error_message = "g2-standard-32 has 1"
  }
  assert {
    condition     = strcontains(output.cost_note, format("%.2f an hour", 1 * local.price.l4 + 32 * local.price.g2_vcpu))
    error_message = "1 L4 and 32 vCPUs in the sum"
  }
}

run "g2_standard_48_has_4" {
  command = plan
  variables {
    machine_type = "g2-standard-48"
  }
  assert {
    condition     = google_container_node_pool.gpu.node_config[0].guest_accelerator[0].count == 4 && output.gpu_count == 4
    error_message = "g2-standard-48 has 4"
  }
  assert {
    condition     = strcontains(output.cost_note, format("%.2f an hour", 4 * local.price.l4 + 48 * local.price.g2_vcpu))
    error_message = "4 L4 and 48 vCPUs in the sum"
  }
}

run "g2_standard_96_has_8" {
  command = plan
  variables {
    machine_type = "g2-standard-96"
  }
  assert {
    condition     = google_container_node_pool.gpu.node_config[0].guest_accelerator[0].count == 8 && output.gpu_count == 8
    error_message = "g2-standard-96 has 8"
  }
  assert {
    condition     = strcontains(output.cost_note, format("%.2f an hour", 8 * local.price.l4 + 96 * local.price.g2_vcpu))
    error_message = "8 L4 and 96 vCPUs in the sum"
  }
}
