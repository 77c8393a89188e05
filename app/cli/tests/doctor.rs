//! `npuhal doctor` on machines that were seen in public, each as a directory tree, and on virtual NPUs.

use serde_json::Value;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

const PCI: &str = "0000:c5:00.1";
/// A user who owns nothing of the tree.
const USER: u32 = 64242;
const STRANGERS: u32 = 64001;

/// A machine on which all is well, to be damaged by the case.
struct Machine {
    root: TempDir,
}

impl Machine {
    fn new(device: &str, revision: &str, firmware: &str) -> Self {
        let machine = Self { root: tempfile::tempdir().unwrap() };
        let directory = format!("sys/devices/pci0000:00/{PCI}");
        for (name, text) in [
            ("vendor", "0x1022"),
            ("device", device),
            ("revision", revision),
            ("device_type", "0"),
            ("vbnv", "RyzenAI-npu"),
            ("fw_version", firmware),
        ] {
            machine.write(&format!("{directory}/{name}"), &format!("{text}\n"));
        }
        for name in ["accel/accel0", "sys/kernel/iommu_groups/7", "sys/bus/pci/devices", "sys/bus/pci/drivers/amdxdna"]
        {
            let name = name.strip_prefix("accel/").map_or(name.to_owned(), |node| format!("{directory}/accel/{node}"));
            fs::create_dir_all(machine.path(&name)).unwrap();
        }
        for (target, link) in [
            ("sys/kernel/iommu_groups/7", format!("{directory}/iommu_group")),
            ("sys/bus/pci/drivers/amdxdna", format!("{directory}/driver")),
            (&directory, format!("sys/bus/pci/devices/{PCI}")),
            (&directory, format!("sys/bus/pci/drivers/amdxdna/{PCI}")),
        ] {
            symlink(machine.path(target), machine.path(&link)).unwrap();
        }
        machine.write("sys/module/amdxdna/taint", "\n");
        machine.write("dev/accel/accel0", "");
        machine.mode(0o660);
        let render = fs::metadata(machine.path("dev/accel/accel0")).unwrap().gid();
        machine.write("etc/group", &format!("strangers:x:{STRANGERS}:\nrender:x:{render}:somebody\n"));
        machine.write("proc/cpuinfo", "processor\t: 0\nmodel name\t: AMD Ryzen AI\nflags\t\t: fpu avx2 clflushopt\n");
        machine.write("proc/cmdline", "quiet splash\n");
        machine.write("proc/sys/kernel/osrelease", "6.19.3\n");
        machine.write("proc/net/tcp", "  sl  local_address rem_address   st\n");
        machine.user(&[STRANGERS, render]);
        machine.memlock("unlimited");
        machine.write("models/mine.gguf", "GGUF");
        machine.log(&["[drm] Initialized amdxdna_accel_driver 0.6.0 for 0000:c5:00.1 on minor 0"]);
        machine
    }

    fn phoenix() -> Self {
        Self::new("0x1502", "0x00", "1.5.5.391")
    }

    fn strix_halo() -> Self {
        Self::new("0x17f0", "0x11", "1.1.2.64")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn mode(&self, mode: u32) {
        fs::set_permissions(self.path("dev/accel/accel0"), fs::Permissions::from_mode(mode)).unwrap();
    }

    fn user(&self, groups: &[u32]) {
        let groups: Vec<String> = groups.iter().map(u32::to_string).collect();
        let id = format!("{USER}\t{USER}\t{USER}\t{USER}");
        let group = format!("{STRANGERS}\t{STRANGERS}\t{STRANGERS}\t{STRANGERS}");
        self.write("proc/self/status", &format!("Uid:\t{id}\nGid:\t{group}\nGroups:\t{} \n", groups.join(" ")));
    }

    fn memlock(&self, limit: &str) {
        let line = format!("Max locked memory         {limit}              {limit}              bytes     \n");
        self.write("proc/self/limits", &line);
    }

    /// Lines of the driver in the kernel log.
    fn log(&self, lines: &[&str]) {
        let text: String = lines
            .iter()
            .enumerate()
            .map(|(i, line)| match line.starts_with('[') {
                true => format!("[   {i}.102938] {line}\n"),
                false => format!("[   {i}.102938] amdxdna {PCI}: [drm] *ERROR* {line}\n"),
            })
            .collect();
        self.write("var/log/dmesg", &text);
    }

    /// The driver is loaded and did not take the device.
    fn unbind(&self) {
        let directory = format!("sys/devices/pci0000:00/{PCI}");
        fs::remove_file(self.path(&format!("{directory}/driver"))).unwrap();
        fs::remove_dir_all(self.path(&format!("{directory}/accel"))).unwrap();
        fs::remove_file(self.path(&format!("sys/bus/pci/drivers/amdxdna/{PCI}"))).unwrap();
        fs::remove_file(self.path("dev/accel/accel0")).unwrap();
    }

    /// Another program holds the NPU.
    fn hold(&self, pid: u32, name: &str) {
        self.write(&format!("proc/{pid}/comm"), &format!("{name}\n"));
        fs::create_dir_all(self.path(&format!("proc/{pid}/fd"))).unwrap();
        symlink("/dev/accel/accel0", self.path(&format!("proc/{pid}/fd/7"))).unwrap();
    }

    fn doctor(&self) -> Command {
        let mut command = doctor();
        command.arg("--root").arg(self.root.path()).arg("--models-dir").arg(self.path("models"));
        command
    }
}

fn doctor() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_npuhal"));
    command.arg("doctor").stdin(Stdio::null()).env_remove("NPUHAL_MODELS");
    command
}

fn run(command: &mut Command) -> (i32, String) {
    let Output { status, stdout, stderr } = command.output().expect("the binary starts");
    let (stdout, stderr) = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
    (status.code().expect("no signal"), if stdout.is_empty() { stderr } else { stdout })
}

fn report(command: &mut Command) -> (i32, Value) {
    let (code, text) = run(command.arg("--json"));
    (code, serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")))
}

/// What a case must say.
struct Expected {
    status: &'static str,
    /// Check that is not OK, and phrases of its issues.
    check: &'static str,
    phrases: &'static [&'static str],
    /// Phrases of the remedies and of the next command.
    remedy: &'static str,
    next: &'static str,
}

fn assert_case(name: &str, machine: &Machine, expected: &Expected) {
    let (code, report) = report(&mut machine.doctor());
    let shown = format!("{name}: {report:#}");
    assert_eq!(report["overall_status"], expected.status, "{shown}");
    assert_eq!(
        code,
        ["OK", "WARN", "FAIL"].iter().position(|status| *status == expected.status).unwrap() as i32,
        "{shown}"
    );
    assert_schema(&report);
    let next = report["next_command"].as_str().unwrap();
    assert!(next.contains(expected.next), "{name}: {} in {shown}", expected.next);
    if expected.check.is_empty() {
        return;
    }
    let checks = report["checks"].as_array().unwrap();
    let check = checks.iter().find(|check| check["name"] == expected.check).unwrap_or_else(|| panic!("{shown}"));
    assert_eq!(check["status"], expected.status, "{shown}");
    let issues = check["issues"].to_string();
    for phrase in expected.phrases {
        assert!(issues.contains(phrase), "{name}: {phrase} in {shown}");
    }
    assert!(check["remediation"].to_string().contains(expected.remedy), "{name}: {} in {shown}", expected.remedy);
    // The text says the same.
    let (text_code, text) = run(&mut machine.doctor());
    assert_eq!(text_code, code);
    let last: Vec<&str> = text.trim_end().lines().rev().take(2).collect();
    assert_eq!(last[0], format!("Next: {next}"));
    assert_eq!(last[1], format!("{}: {}", expected.status, report["verdict"].as_str().unwrap()));
    let badge = if expected.status == "FAIL" { "[✗]" } else { "[!]" };
    assert!(
        text.lines().any(|line| line.starts_with(&format!("{badge} {}", expected.check.replace('_', " ")))),
        "{text}"
    );
}

/// The fields that do not change.
fn assert_schema(report: &Value) {
    let keys: Vec<&String> = report.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["overall_status", "checks", "not_tried", "verdict", "next_command"]);
    for check in report["checks"].as_array().unwrap() {
        assert!(["OK", "WARN", "FAIL"].contains(&check["status"].as_str().unwrap()));
        for list in ["found", "issues", "remediation"] {
            assert!(check[list].as_array().unwrap().iter().all(Value::is_string));
        }
        let is_ok = check["status"] == "OK";
        assert_eq!(check["issues"].as_array().unwrap().is_empty(), is_ok, "{check:#}");
        assert!(is_ok || !check["remediation"].as_array().unwrap().is_empty(), "what to do: {check:#}");
    }
    assert!(report["verdict"].as_str().unwrap().ends_with('.'));
    assert!(!report["next_command"].as_str().unwrap().is_empty());
}

const WELL: Expected = Expected { status: "OK", check: "", phrases: &[], remedy: "", next: "npuhal run" };

#[test]
fn all_well() {
    for machine in [Machine::phoenix(), Machine::strix_halo()] {
        assert_case("all well", &machine, &WELL);
        let (_, report) = report(&mut machine.doctor());
        assert!(report["verdict"].as_str().unwrap().contains("whether it runs commands was not tried"));
        assert!(report["not_tried"].to_string().contains("was not opened"), "{report:#}");
        assert!(report["next_command"].as_str().unwrap().contains("mine.gguf"), "the model that is here");
    }
}

#[test]
fn no_permission_is_not_called_no_npu() {
    let machine = Machine::strix_halo();
    machine.user(&[STRANGERS]);
    let expected = Expected {
        status: "FAIL",
        check: "access",
        phrases: &["no access to", "belongs to group render", "the user is in strangers", "EACCES"],
        remedy: "log in again",
        next: "sudo usermod -aG render $USER",
    };
    assert_case("EACCES", &machine, &expected);
    machine.mode(0o600);
    assert_case(
        "EACCES, the group may not either",
        &machine,
        &Expected { remedy: "chmod 660", next: "chmod 660", ..expected },
    );
}

#[test]
fn shared_virtual_addressing_fails() {
    for (number, phrase, next) in [
        (-19, "no shared virtual addressing (ENODEV)", "cat /proc/cmdline"),
        (-28, "before 6.10", "uname -r"),
        (-95, "switched off", "uname -r"),
        (-22, "cannot be shared with the NPU (SVA)", "cat /proc/cmdline"),
    ] {
        let machine = Machine::strix_halo();
        let failed = format!("amdxdna_drm_open: SVA bind device failed, ret {number}");
        machine.log(&["[drm] Initialized amdxdna_accel_driver 0.0.0 for 0000:c5:00.1 on minor 0", &failed]);
        let expected =
            Expected { status: "FAIL", check: "kernel_log", phrases: &["SVA bind device failed"], remedy: "", next };
        assert_case(&failed, &machine, &expected);
        let (_, report) = report(&mut machine.doctor());
        assert!(report["verdict"].as_str().unwrap().contains(phrase), "{report:#}");
    }
}

#[test]
fn firmware_that_is_not_alive() {
    let machine = Machine::phoenix();
    machine.unbind();
    machine.write("lib/firmware/amdnpu/1502_00/npu.sbin", "");
    machine.log(&[
        "aie2_get_mgmt_chann_info: Invalid mbox magic 0x30ec000",
        "aie2_hw_start: firmware is not alive",
        "aie2_smu_exec: smu cmd 4 failed, 0xff",
        "aie2_init: start npu failed, ret -22",
        "amdxdna_probe: Hardware init failed, ret -22",
    ]);
    let expected = Expected {
        status: "FAIL",
        check: "kernel_log",
        phrases: &["Invalid mbox magic 0x30ec000", "firmware is not alive"],
        remedy: "from one source",
        next: "ls -l /lib/firmware/amdnpu/*",
    };
    assert_case("mbox magic", &machine, &expected);
    let (_, report) = report(&mut machine.doctor());
    assert!(report["verdict"].as_str().unwrap().contains("not a firmware for this driver"), "{report:#}");
    assert!(report["checks"].to_string().contains("the module amdxdna is loaded but did not take the device"));
    assert!(report["checks"].to_string().contains("/lib/firmware/amdnpu/1502_00: npu.sbin"));
    machine.log(&["aie2_hw_start: firmware is not alive", "amdxdna_probe: Hardware init failed, ret -62"]);
    assert_case("not alive", &machine, &Expected { phrases: &["the firmware is not alive"], ..expected });
}

#[test]
fn driver_and_firmware_speak_different_protocols() {
    let expected = |phrases, remedy| Expected {
        status: "FAIL",
        check: "kernel_log",
        phrases,
        remedy,
        next: "ls -l /lib/firmware/amdnpu/*",
    };
    let machine = Machine::strix_halo();
    machine.unbind();
    machine.log(&[
        "aie2_check_protocol: Incompatible firmware protocol major 7 minor 3",
        "aie2_hw_start: firmware is not alive",
        "amdxdna_probe: Hardware init failed, ret -22",
    ]);
    let major = expected(&["major version", "major 7 minor 3"], "update the kernel");
    assert_case("protocol major", &machine, &major);
    machine.log(&[
        "aie2_check_protocol: Firmware minor version smaller than supported",
        "amdxdna_probe: Hardware init failed, ret -22",
    ]);
    assert_case("protocol minor", &machine, &expected(&["minor version is too small"], "update linux-firmware"));
    machine
        .log(&["aie2_check_protocol: Firmware 6.8 below minimum 6.12", "amdxdna_probe: Hardware init failed, ret -22"]);
    assert_case(
        "protocol minimum",
        &machine,
        &expected(&["older than the driver needs", "6.8"], "update linux-firmware"),
    );
}

#[test]
fn too_little_locked_memory_is_not_called_no_device() {
    let machine = Machine::strix_halo();
    machine.memlock("8388608");
    let expected = Expected {
        status: "WARN",
        check: "locked_memory",
        phrases: &["8192 KiB", "65536 KiB", "no device"],
        remedy: "ulimit -l unlimited",
        next: "memlock unlimited",
    };
    assert_case("memlock", &machine, &expected);
}

#[test]
fn the_device_is_listed_but_makes_no_context() {
    let machine = Machine::strix_halo();
    machine.log(&[
        "[drm] Initialized amdxdna_accel_driver 0.6.0 for 0000:c5:00.1 on minor 0",
        "aie2_send_mgmt_msg_wait: command opcode 0x2 failed, status 0x2000005",
        "aie2_hwctx_init: Create context failed, ret -22",
        "amdxdna_drm_create_hwctx_ioctl: Init hwctx failed, ret -22",
    ]);
    let expected = Expected {
        status: "FAIL",
        check: "kernel_log",
        phrases: &["CREATE_HWCTX", "Init hwctx failed, ret -22"],
        remedy: "out-of-tree driver",
        next: "modinfo",
    };
    assert_case("CREATE_HWCTX", &machine, &expected);
    machine.log(&[
        "aie2_hwctx_init: Map host buffer failed, ret -22",
        "amdxdna_drm_create_hwctx_ioctl: Init hwctx failed, ret -22",
    ]);
    let heap = Expected { phrases: &["refused the device heap"], remedy: "from one source", next: "ls -l", ..expected };
    assert_case("heap", &machine, &heap);
}

#[test]
fn the_kernel_s_own_driver_lists_the_npu_and_commands_abort() {
    let line = "[drm:xdna_mailbox] amdxdna 0000:c5:00.1: xdna_mailbox.145: Message callback ret -22";
    let machine = Machine::phoenix();
    machine.log(&[line]);
    let expected = Expected {
        status: "FAIL",
        check: "kernel_log",
        phrases: &["ERT_CMD_STATE_ABORT", "Message callback ret -22"],
        remedy: "out-of-tree driver together with the firmware",
        next: "modinfo",
    };
    assert_case("in-tree", &machine, &expected);
    // The other driver prints it too, and may do well.
    machine.write("sys/module/amdxdna/taint", "OE\n");
    let other = Expected {
        status: "WARN",
        phrases: &["may be harmless"],
        remedy: "from one source",
        next: "ls -l",
        ..expected
    };
    assert_case("out-of-tree", &machine, &other);
}

#[test]
fn all_contexts_are_taken() {
    let machine = Machine::phoenix();
    machine.log(&[
        "aie2_send_mgmt_msg_wait: command opcode 0x2 failed, status 0x2000003",
        "aie2_alloc_resource: Allocate AIE resource failed, ret -22",
        "amdxdna_drm_create_hwctx_ioctl: Init hwctx failed, ret -22",
    ]);
    let expected = Expected {
        status: "WARN",
        check: "kernel_log",
        phrases: &["all hardware contexts", "6 on npu1", "no program that this user can see"],
        remedy: "close the other programs",
        next: "fuser",
    };
    assert_case("taken before", &machine, &expected);
    machine.hold(4158, "flm");
    let now = Expected { status: "FAIL", phrases: &["held by flm (pid 4158)"], remedy: "flm (pid 4158)", ..expected };
    assert_case("taken now", &machine, &now);
}

#[test]
fn memory_cannot_be_shared_without_an_iommu() {
    let machine = Machine::phoenix();
    fs::remove_file(machine.path(&format!("sys/devices/pci0000:00/{PCI}/iommu_group"))).unwrap();
    let expected = Expected {
        status: "FAIL",
        check: "memory_sharing",
        phrases: &["the IOMMU is off"],
        remedy: "BIOS",
        next: "cat /proc/cmdline",
    };
    assert_case("no IOMMU", &machine, &expected);
    machine.write("proc/cmdline", "quiet amd_iommu=off\n");
    assert_case("amd_iommu=off", &machine, &Expected { remedy: "amd_iommu=off", ..expected });
    // The log of such a machine says -19; the cause is told first.
    machine.write("proc/cpuinfo", "flags\t\t: fpu avx2 hypervisor\n");
    machine.log(&["amdxdna_drm_open: SVA bind device failed, ret -19"]);
    let guest = Expected {
        phrases: &["virtual machine"],
        remedy: "run on the machine itself",
        next: "cat /proc/cmdline",
        ..expected
    };
    assert_case("virtual machine", &machine, &guest);
    let (_, report) = report(&mut machine.doctor());
    assert!(report["verdict"].as_str().unwrap().contains("inside a virtual machine"), "{report:#}");
}

#[test]
fn the_module_is_not_loaded() {
    let machine = Machine::phoenix();
    machine.unbind();
    fs::remove_dir_all(machine.path("sys/module/amdxdna")).unwrap();
    machine.log(&["[drm] something else"]);
    let expected = Expected {
        status: "FAIL",
        check: "driver",
        phrases: &["the module amdxdna is not loaded"],
        remedy: "modprobe",
        next: "sudo modprobe amdxdna",
    };
    assert_case("no module", &machine, &expected);
}

#[test]
fn firmware_is_missing_denied_or_old() {
    let machine = Machine::phoenix();
    machine.unbind();
    machine.log(&[
        "[drm] amdxdna 0000:c5:00.1: Direct firmware load for amdnpu/1502_00/npu.sbin failed with error -2",
        "aie2_init: failed to request_firmware amdnpu/1502_00/npu.sbin, ret -2",
        "amdxdna_probe: Hardware init failed, ret -2",
    ]);
    let missing = Expected {
        status: "FAIL",
        check: "kernel_log",
        phrases: &["found no firmware", "npu.sbin"],
        remedy: "linux-firmware",
        next: "ls -l",
    };
    assert_case("missing", &machine, &missing);
    let denied = Expected {
        status: "FAIL",
        check: "firmware",
        phrases: &["1.5.1.323", "buggy"],
        remedy: "update linux-firmware",
        next: "ls -l /lib/firmware/amdnpu/1502_00",
    };
    assert_case("denied", &Machine::new("0x1502", "0x00", "1.5.1.323"), &denied);
    let old = Expected { status: "WARN", phrases: &["1.0.20.31", "too old"], next: "17f0_10", ..denied };
    assert_case("old", &Machine::new("0x17f0", "0x10", "1.0.20.31"), &old);
}

#[test]
fn a_later_part_is_here_but_not_served() {
    let machine = Machine::new("0x17f1", "0x10", "1.0.0.0");
    let expected = Expected {
        status: "WARN",
        check: "npu",
        phrases: &["17f1", "AIE4", "not supported"],
        remedy: "models run on the CPU",
        next: "npuhal run",
    };
    assert_case("AIE4", &machine, &expected);
}

#[test]
fn one_of_two_devices_cannot_be_used() {
    let machine = Machine::strix_halo();
    for (name, text) in [("vendor", "0x1022"), ("device", "0x17f0"), ("revision", "0x11")] {
        machine.write(&format!("sys/bus/pci/devices/0000:c6:00.1/{name}"), text);
    }
    let expected = Expected {
        status: "FAIL",
        check: "driver",
        phrases: &["amdxdna:0000:c6:00.1: the module amdxdna is loaded but did not take the device"],
        remedy: "dmesg",
        next: "cat /proc/cmdline",
    };
    assert_case("two devices", &machine, &expected);
    let (_, report) = report(&mut machine.doctor());
    let verdict = report["verdict"].as_str().unwrap();
    assert!(verdict.starts_with("Not all of the NPUs npu5, amdxdna:0000:c6:00.1 can be used"), "{verdict}");
}

#[test]
fn nothing_is_here() {
    let machine = Machine { root: tempfile::tempdir().unwrap() };
    let expected = Expected {
        status: "WARN",
        check: "npu",
        phrases: &["no NPU found (no /dev/accel/accel* node"],
        remedy: "BIOS",
        next: "npuhal pull smollm2-135m",
    };
    assert_case("empty", &machine, &expected);
    let (_, report) = report(&mut machine.doctor());
    assert_eq!(
        report["verdict"],
        "No NPU found (no /dev/accel/accel* node, no NPU on the PCI bus); npuhal runs on the CPU."
    );
}

#[test]
fn errors_before_the_driver_last_started_are_history() {
    let machine = Machine::strix_halo();
    machine.log(&[
        "aie2_check_protocol: Incompatible firmware protocol major 7 minor 3",
        "amdxdna_probe: Hardware init failed, ret -22",
        "[drm] Initialized amdxdna_accel_driver 0.6.0 for 0000:c5:00.1 on minor 0",
        "aie2_hwctx_cfg_debug_bo: Get bo 4 failed",
    ]);
    assert_case("history", &machine, &WELL);
    fs::remove_file(machine.path("var/log/dmesg")).unwrap();
    machine.write(
        "var/log/kern.log",
        "Nov 29 kernel: amdxdna 0000:c5:00.1: [drm] *ERROR* amdxdna_drm_open: SVA bind device failed, ret -19\n\
         Nov 30 kernel: Linux version 6.19.3\n",
    );
    assert_case("the boot before", &machine, &WELL);
    machine.write("var/log/kern.log", "Nov 30 kernel: amdxdna 0000:c5:00.1: [drm] *ERROR* new_function: new words\n");
    let unknown = Expected {
        status: "WARN",
        check: "kernel_log",
        phrases: &["does not know", "new_function: new words"],
        remedy: "dmesg",
        next: "dmesg",
    };
    assert_case("unknown", &machine, &unknown);
}

#[test]
fn a_log_that_cannot_be_read_is_not_called_clean() {
    let machine = Machine::strix_halo();
    fs::remove_file(machine.path("var/log/dmesg")).unwrap();
    let (code, report) = report(&mut machine.doctor());
    assert_eq!(code, 0);
    assert!(report["checks"].as_array().unwrap().iter().all(|check| check["name"] != "kernel_log"));
    let not_tried = report["not_tried"].to_string();
    assert!(not_tried.contains("the kernel log cannot be read") && not_tried.contains("sudo dmesg"), "{not_tried}");
    // The log comes from elsewhere.
    let log = machine.path("npu.log");
    fs::write(&log, "amdxdna 0000:c5:00.1: [drm] *ERROR* amdxdna_drm_open: SVA bind device failed, ret -28\n").unwrap();
    let (code, text) = run(machine.doctor().arg("--kernel-log").arg(&log));
    assert!(code == 2 && text.contains("[✗] kernel log") && text.contains("npu.log"), "{text}");
    let empty = tempfile::tempdir().unwrap();
    let (code, text) = run(doctor().arg("--root").arg(empty.path()).arg("--kernel-log").arg(&log));
    assert!(code == 2 && text.contains("[✗] kernel log"), "also where no NPU is found: {text}");
    let (code, text) = run(machine.doctor().args(["--kernel-log", "/no/such/log"]));
    assert!(code == 2 && text.contains("/no/such/log"), "{text}");
}

#[test]
fn models_and_port() {
    let machine = Machine::strix_halo();
    fs::remove_file(machine.path("models/mine.gguf")).unwrap();
    machine.write("models/SmolLM2-135M-Instruct.Q4_1.gguf", "cut off");
    let cut = Expected {
        status: "WARN",
        check: "models",
        phrases: &["smollm2-135m: the file has another size"],
        remedy: "npuhal pull smollm2-135m",
        next: "npuhal pull smollm2-135m",
    };
    assert_case("damaged model", &machine, &cut);
    fs::remove_file(machine.path("models/SmolLM2-135M-Instruct.Q4_1.gguf")).unwrap();
    assert_case("no model", &machine, &Expected { phrases: &["no model is here"], ..cut });
    let machine = Machine::strix_halo();
    machine.write("proc/net/tcp", "  sl  local_address rem_address   st\n   0: 0100007F:1F40 00000000:0000 0A\n");
    let taken = Expected { check: "port", phrases: &["8000"], remedy: "another port", next: "npuhal run", ..cut };
    assert_case("port", &machine, &taken);
    let machine = Machine::strix_halo();
    machine.write("models/llama/decoder.xclbin", "");
    let kernels =
        Expected { check: "kernels", phrases: &["no route that uses them"], remedy: "CPU", next: "npuhal run", ..cut };
    assert_case("kernels", &machine, &kernels);
}

#[test]
fn a_virtual_npu_runs_a_command_and_is_called_virtual() {
    let models = tempfile::tempdir().unwrap();
    fs::write(models.path().join("mine.gguf"), "GGUF").unwrap();
    for device in [
        "virtual:npu1",
        "virtual:npu4",
        "virtual:npu5",
        "virtual:npu1?profile=mainline-old",
        "virtual:npu5?profile=out-of-tree",
    ] {
        let (_, report) = report(doctor().args(["--device", device, "--models-dir"]).arg(models.path()));
        assert_schema(&report);
        let checks = report["checks"].as_array().unwrap();
        for name in ["npu", "device", "context", "command"] {
            let check = checks.iter().find(|check| check["name"] == name).unwrap();
            assert_eq!(check["status"], "OK", "{device}: {check:#}");
        }
        let command = checks.iter().find(|check| check["name"] == "command").unwrap();
        let found = command["found"].to_string();
        assert!(found.contains("virtual: copied 4096 words") && found.contains("modelled"), "{found}");
        let verdict = report["verdict"].as_str().unwrap();
        assert!(verdict.contains("All of it is virtual: it says nothing about hardware"), "{verdict}");
    }
}

#[test]
fn a_fault_of_a_virtual_npu_is_a_failed_check() {
    for (device, check, phrase) in [
        ("virtual:npu5?fault=timeout@0", "command", "timed out"),
        ("virtual:npu1?fault=error@0", "command", "ERROR"),
        ("virtual:npu1?fault=remove@0", "command", ""),
        ("virtual:npu1?fault=EINVAL@context:0", "context", "creating a hardware context failed"),
        ("virtual:npu4?fault=ENOMEM@heap:0", "device", "creating the device heap failed"),
        ("virtual:npu4?fault=EBUSY@version:0", "device", "asking the driver for its version"),
    ] {
        let (code, report) = report(doctor().args(["--device", device]));
        assert_eq!(code, 2, "{device}");
        assert_schema(&report);
        let checks = report["checks"].as_array().unwrap();
        let failed = checks.iter().find(|found| found["name"] == check).unwrap();
        assert_eq!(failed["status"], "FAIL", "{device}: {report:#}");
        assert!(failed["issues"].to_string().contains(phrase), "{device}: {failed:#}");
        let plain = device.split('?').next().unwrap();
        assert_eq!(report["next_command"], format!("npuhal doctor --device {plain}"));
    }
}

#[test]
fn devices_that_cannot_be_tried_are_usage_errors_or_failures() {
    for (args, phrases) in [
        (&["--device", "cpu"][..], &["doctor tries NPUs"][..]),
        (&["--device", "gpu"], &["gpu", "npu1"]),
        (&["--device", "virtual:npu1?profile=newest"], &["newest", "mainline-old"]),
        (&["--device", "virtual:npu1?fault=explode@1"], &["explode"]),
        (&["--device", "npu1", "--root", "/"], &["--root"]),
        (&["--device", "virtual:npu1", "--kernel-log", "/dev/null"], &["--kernel-log", "has no kernel"]),
        (&["--root", "/no/such/tree"], &["/no/such/tree", "directory"]),
    ] {
        let (code, text) = run(doctor().args(args));
        assert_eq!(code, 2, "{args:?}: {text}");
        assert!(phrases.iter().all(|phrase| text.contains(phrase)), "{args:?}: {text}");
    }
    let (code, report) = report(doctor().args(["--device", "amdxdna:0000:ff:1f.7"]));
    assert_eq!(code, 2);
    assert!(report["verdict"].as_str().unwrap().contains("wanted the device amdxdna:0000:ff:1f.7"), "{report:#}");
}

#[test]
fn this_machine_can_be_examined() {
    let (code, report) = report(&mut doctor());
    assert_schema(&report);
    let status = ["OK", "WARN", "FAIL"][usize::try_from(code).unwrap()];
    assert_eq!(report["overall_status"], status);
    let npu = report["checks"].as_array().unwrap().iter().find(|check| check["name"] == "npu").unwrap();
    assert!(npu["status"] == "WARN" || !npu["found"].as_array().unwrap().is_empty(), "{npu:#}");
}
