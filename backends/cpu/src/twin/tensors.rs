//! Tensors of a model file as a twin takes them: of the shape that the configuration says, row by row.

use super::error::TwinError;
use npuhal_models::Tensor;

/// The tensor, if it is `rows` × `cols`.
pub(super) fn checked(tensor: &Tensor, rows: usize, cols: usize) -> Result<&Tensor, TwinError> {
    check_shape(tensor.name(), (tensor.rows(), tensor.cols()), (rows, cols)).map(|()| tensor)
}

/// Holds rows and columns of a tensor against what the configuration says.
pub(super) fn check_shape(name: &str, found: (usize, usize), wanted: (usize, usize)) -> Result<(), TwinError> {
    if found == wanted {
        return Ok(());
    }
    let ((found_rows, found_cols), (rows, cols)) = (found, wanted);
    Err(TwinError::Shape { tensor: name.to_owned(), rows, cols, found_rows, found_cols })
}

/// Fills `out` with a row of the tensor, as its format defines it.
pub(super) fn read_row(tensor: &Tensor, row: usize, out: &mut [f32]) -> Result<(), TwinError> {
    tensor
        .dequantize_row(row, out)
        .map_err(|error| TwinError::Elements { tensor: tensor.name().to_owned(), reason: error.to_string() })
}
