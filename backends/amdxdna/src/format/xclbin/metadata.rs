//! EMBEDDED_METADATA: kernels and their arguments, as XML.

use super::XclbinError;
use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};
use std::fmt::Write as _;

/// Path of the elements that describe kernels.
const KERNEL_PATH: [&[u8]; 4] = [b"project", b"platform", b"device", b"core"];
/// Deeper nesting is not taken for metadata.
const MAX_DEPTH: usize = 32;

/// Kernels in file order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Metadata {
    /// Kernels.
    pub kernels: Vec<Kernel>,
}

/// A kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kernel {
    /// Name.
    pub name: String,
    /// Type; `dpu` for NPU kernels.
    pub kind: String,
    /// Functional code.
    pub functional: u32,
    /// Subtype code; 1 for NPU kernels.
    pub subtype: u32,
    /// Id by which the partition image is found.
    pub dpu_kernel_id: Option<u64>,
    /// Arguments in file order.
    pub arguments: Vec<KernelArgument>,
    /// Instance names in file order.
    pub instances: Vec<String>,
}

/// Whether an argument is a value or a buffer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum AddressQualifier {
    /// A value.
    #[default]
    Scalar,
    /// The address of a buffer.
    Global,
    /// A code that NPU kernels do not use.
    Other(u32),
}

impl AddressQualifier {
    fn from_code(code: u32) -> Self {
        match code {
            0 => Self::Scalar,
            1 => Self::Global,
            other => Self::Other(other),
        }
    }

    fn code(self) -> u32 {
        match self {
            Self::Scalar => 0,
            Self::Global => 1,
            Self::Other(code) => code,
        }
    }
}

/// An argument of a kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KernelArgument {
    /// Name.
    pub name: String,
    /// Position.
    pub id: u32,
    /// Value or buffer.
    pub qualifier: AddressQualifier,
    /// Port; usually empty.
    pub port: String,
    /// Bytes in the argument register map.
    pub size_bytes: u32,
    /// Byte offset in the argument register map.
    pub offset_bytes: u32,
    /// Bytes of the host's type.
    pub host_size_bytes: u32,
    /// Type, as in C.
    pub c_type: String,
}

impl Kernel {
    /// Bytes of the argument register map: the end of the last argument.
    pub fn register_map_bytes(&self) -> u64 {
        self.arguments.iter().map(|a| u64::from(a.offset_bytes) + u64::from(a.size_bytes)).max().unwrap_or(0)
    }

    /// The argument with this name.
    pub fn argument(&self, name: &str) -> Option<&KernelArgument> {
        self.arguments.iter().find(|argument| argument.name == name)
    }
}

impl Metadata {
    /// Parses an EMBEDDED_METADATA section.
    pub fn parse(data: &[u8]) -> Result<Self, XclbinError> {
        let end = data.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        let text = std::str::from_utf8(&data[..end]).map_err(|error| XclbinError::Metadata {
            at_bytes: error.valid_up_to() as u64,
            reason: "not UTF-8".to_owned(),
        })?;
        let mut parser = Parser { reader: Reader::from_str(text), path: Vec::new(), kernels: Vec::new() };
        parser.run()?;
        Ok(Self { kernels: parser.kernels })
    }

    /// Contents of an EMBEDDED_METADATA section.
    pub fn to_xml(&self) -> String {
        let mut out = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
        out.push_str(
            "<project name=\"npuhal\"><platform vendor=\"amd\" boardid=\"npu\" name=\"npu\" featureRomTime=\"0\">",
        );
        out.push_str("<version major=\"0\" minor=\"1\"/><device name=\"npu\" fpgaDevice=\"npu\">");
        let units: usize = self.kernels.iter().map(|kernel| kernel.instances.len()).sum();
        // Writing to a String cannot fail.
        let _ = write!(
            out,
            "<core name=\"OCL_REGION_0\" target=\"hw\" type=\"clc_region\" clockFreq=\"0\" numComputeUnits=\"{units}\">"
        );
        for kernel in &self.kernels {
            write_kernel(&mut out, kernel);
        }
        out.push_str("</core></device></platform></project>");
        out
    }
}

fn write_kernel(out: &mut String, kernel: &Kernel) {
    let escape = |text| quick_xml::escape::escape(text);
    let (name, kind) = (escape(kernel.name.as_str()), escape(kernel.kind.as_str()));
    let _ = write!(out, "<kernel name=\"{name}\" language=\"c\" type=\"{kind}\">");
    let _ = write!(out, "<extended-data subtype=\"{}\" functional=\"{}\"", kernel.subtype, kernel.functional);
    if let Some(id) = kernel.dpu_kernel_id {
        let _ = write!(out, " dpu_kernel_id=\"{id:#x}\"");
    }
    out.push_str("/>");
    for argument in &kernel.arguments {
        let _ = write!(
            out,
            "<arg name=\"{}\" addressQualifier=\"{}\" id=\"{}\"",
            escape(argument.name.as_str()),
            argument.qualifier.code(),
            argument.id
        );
        if !argument.port.is_empty() {
            let _ = write!(out, " port=\"{}\"", escape(argument.port.as_str()));
        }
        let _ = write!(
            out,
            " size=\"{:#x}\" offset=\"{:#x}\" hostOffset=\"0x0\" hostSize=\"{:#x}\" type=\"{}\"/>",
            argument.size_bytes,
            argument.offset_bytes,
            argument.host_size_bytes,
            escape(argument.c_type.as_str())
        );
    }
    for instance in &kernel.instances {
        let _ = write!(out, "<instance name=\"{}\"/>", escape(instance.as_str()));
    }
    out.push_str("</kernel>");
}

struct Parser<'a> {
    reader: Reader<&'a [u8]>,
    /// Names of the open elements.
    path: Vec<Vec<u8>>,
    kernels: Vec<Kernel>,
}

impl Parser<'_> {
    fn run(&mut self) -> Result<(), XclbinError> {
        loop {
            let event = self.reader.read_event().map_err(|error| self.fail(error.to_string()))?;
            match event {
                Event::Start(element) => {
                    self.element(&element)?;
                    if self.path.len() == MAX_DEPTH {
                        return Err(self.fail(format!("elements are nested deeper than {MAX_DEPTH}")));
                    }
                    self.path.push(element.name().as_ref().to_vec());
                }
                Event::Empty(element) => self.element(&element)?,
                Event::End(_) => {
                    self.path.pop();
                }
                // Nothing here needs a document type, and its entities are a way to blow up a file.
                Event::DocType(_) => return Err(self.fail("it has a document type".to_owned())),
                Event::Eof if !self.path.is_empty() => return Err(self.fail("it ends inside an element".to_owned())),
                Event::Eof => return Ok(()),
                _ => {}
            }
        }
    }

    fn fail(&self, reason: String) -> XclbinError {
        XclbinError::Metadata { at_bytes: self.reader.buffer_position(), reason }
    }

    /// Takes what an element says, if it belongs to a kernel.
    fn element(&mut self, element: &BytesStart<'_>) -> Result<(), XclbinError> {
        let depth = self.path.len();
        let in_core = depth >= 4 && self.path.iter().zip(KERNEL_PATH).all(|(open, wanted)| open == wanted);
        let in_kernel = in_core && depth == 5 && self.path[4] == b"kernel";
        match element.name().as_ref() {
            b"kernel" if in_core && depth == 4 => {
                let kernel = Kernel {
                    name: self.required(element, "name")?,
                    kind: self.attribute(element, "type")?.unwrap_or_default(),
                    ..Kernel::default()
                };
                self.kernels.push(kernel);
            }
            b"extended-data" if in_kernel => {
                let functional = self.number(element, "functional")?.unwrap_or(0);
                let subtype = self.number(element, "subtype")?.unwrap_or(0);
                let id = self.long_number(element, "dpu_kernel_id")?;
                if let Some(kernel) = self.kernels.last_mut() {
                    (kernel.functional, kernel.subtype, kernel.dpu_kernel_id) = (functional, subtype, id);
                }
            }
            b"arg" if in_kernel => {
                let argument = self.argument(element)?;
                if let Some(kernel) = self.kernels.last_mut() {
                    kernel.arguments.push(argument);
                }
            }
            b"instance" if in_kernel => {
                let name = self.required(element, "name")?;
                if let Some(kernel) = self.kernels.last_mut() {
                    kernel.instances.push(name);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn argument(&self, element: &BytesStart<'_>) -> Result<KernelArgument, XclbinError> {
        let needed = |name: &'static str| {
            self.number(element, name)?.ok_or_else(|| self.fail(format!("an argument has no attribute {name}")))
        };
        Ok(KernelArgument {
            name: self.required(element, "name")?,
            id: needed("id")?,
            qualifier: AddressQualifier::from_code(needed("addressQualifier")?),
            port: self.attribute(element, "port")?.unwrap_or_default(),
            size_bytes: needed("size")?,
            offset_bytes: needed("offset")?,
            host_size_bytes: self.number(element, "hostSize")?.unwrap_or(0),
            c_type: self.attribute(element, "type")?.unwrap_or_default(),
        })
    }

    fn attribute(&self, element: &BytesStart<'_>, name: &str) -> Result<Option<String>, XclbinError> {
        let found = element.try_get_attribute(name).map_err(|error| self.fail(error.to_string()))?;
        let value = found.map(|attribute| attribute.unescape_value()).transpose();
        Ok(value.map_err(|error| self.fail(error.to_string()))?.map(|text| text.into_owned()))
    }

    fn required(&self, element: &BytesStart<'_>, name: &str) -> Result<String, XclbinError> {
        let tag = String::from_utf8_lossy(element.name().as_ref()).into_owned();
        self.attribute(element, name)?.ok_or_else(|| self.fail(format!("a {tag} element has no attribute {name}")))
    }

    fn long_number(&self, element: &BytesStart<'_>, name: &str) -> Result<Option<u64>, XclbinError> {
        let Some(text) = self.attribute(element, name)? else { return Ok(None) };
        let digits = text.trim();
        let value = match digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
            Some(hex) => u64::from_str_radix(hex, 16),
            None => digits.parse(),
        };
        value.map(Some).map_err(|_| self.fail(format!("attribute {name}: {text:?} is not a number")))
    }

    fn number(&self, element: &BytesStart<'_>, name: &str) -> Result<Option<u32>, XclbinError> {
        let Some(value) = self.long_number(element, name)? else { return Ok(None) };
        let value = u32::try_from(value);
        value.map(Some).map_err(|_| self.fail(format!("attribute {name} does not fit 32 bits")))
    }
}
